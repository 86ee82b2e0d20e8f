"""A staged model: which of its files are needed, whether they are complete, the digest they have together.

Reading sources and writing to a bucket does not belong here (`resources/weight_sources.py`, `resources/stages.py`).
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, Literal, Protocol

from warmers.errors import WeightsError
from warmers.safetensors import Header

MANIFEST_FORMAT = 2
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
WEIGHTS = ".safetensors"
NEEDED = (WEIGHTS, ".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")
"""What engines read; the rest of a repository stays where it is."""
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
"""Loading one runs whatever code is in it."""
TOKENIZERS = (
    frozenset({"tokenizer.json"}),
    frozenset({"tokenizer.model"}),
    frozenset({"vocab.json", "merges.txt"}),
    frozenset({"tekken.json"}),
)
"""Each is a whole tokenizer."""
CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a source."""

    name: str
    bytes: int
    version: str
    """Another one means another content; what it is made of is the source's own."""
    sha256: str | None = None
    """Where the source says it without being read."""


class WeightSource(Protocol):
    """Where a model comes from."""

    def __str__(self) -> str:
        """As people wrote it."""

    def resolve(self) -> str:
        """The revision that a branch stands for now, or whatever else fixes the content; empty where nothing does."""

    def files(self) -> Sequence[SourceFile]:
        """Every file. Raises WeightsError, or SourceUnavailable."""

    def read(self, file: SourceFile, start: int = 0) -> Iterator[bytes]:
        """Its bytes from `start` on, in pieces. Raises SourceUnavailable, and SourceChanged."""


@dataclass(frozen=True, slots=True)
class StagedFile:
    """One file of a stage."""

    name: str
    bytes: int
    sha256: str
    version: str = ""
    """The source's, when it was read: as long as that stays, so does the SHA-256."""
    tensors: int = 0
    parameters: int = 0
    dtypes: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    """BLAKE3 of every block, 32 hex digits: what is read and compared by itself. Empty where nobody has read it yet."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a stage holds; written last."""

    model: str
    digest: str
    """Over the names and digests of all files, 64 hex digits."""
    source: str
    revision: str
    files: tuple[StagedFile, ...]

    @property
    def total_bytes(self) -> int:
        """Of all files."""
        return sum(file.bytes for file in self.files)

    @property
    def parameters(self) -> int:
        """Of all tensors."""
        return sum(file.parameters for file in self.files)

    def to_json(self) -> bytes:
        """The document."""
        return json.dumps({"format": MANIFEST_FORMAT, **asdict(self)}, indent=2).encode()

    @classmethod
    def from_json(cls, content: bytes) -> "Manifest":
        """Raises WeightsError for what is no manifest of this format."""
        try:
            fields = json.loads(content)
            if fields.pop("format") != MANIFEST_FORMAT:
                raise ValueError("another format")
            tuples = ("dtypes", "blocks")
            files = ({**file, **{name: tuple(file[name]) for name in tuples}} for file in fields.pop("files"))
            return cls(**fields, files=tuple(StagedFile(**file) for file in files))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise WeightsError(
                "reading a manifest", seen=f"{type(error).__name__}: {error}", do="Stage the model again."
            ) from None


def digest_of(files: Iterable[StagedFile]) -> str:
    """Of a stage: over its files' names and digests, whatever their order. 64 hex digits."""
    return sha256("".join(sorted(f"{file.sha256}  {file.name}\n" for file in files)).encode()).hexdigest()


def needed(files: Iterable[SourceFile], model: str) -> tuple[SourceFile, ...]:
    """The files to stage. Raises WeightsError for weights that nobody should load and names that lead elsewhere."""
    files = tuple(files)
    weights = [file for file in files if file.name.endswith(WEIGHTS)]
    pickles = [file.name for file in files if file.name.endswith(PICKLES)]
    doing = f"choosing the files of {model}"
    if pickles and not weights:
        raise WeightsError(
            doing,
            seen=f"its weights are pickles ({', '.join(pickles[:3])}), and loading those runs code that is in them",
            do="Convert them (transformers' save_pretrained writes safetensors), or look for a revision that has them.",
        )
    escaping = [file.name for file in files if file.name.startswith("/") or ".." in file.name.split("/")]
    if escaping:
        raise WeightsError(doing, seen=f"a file is named {escaping[0]!r}", do="Name files below the source alone.")
    return tuple(file for file in files if "/" not in file.name and file.name.endswith(NEEDED))


def findings(
    names: Collection[str],
    headers: Mapping[str, Header],
    config: Mapping[str, Any],
    index: Mapping[str, Any] | None,
    tokenizer_config: Mapping[str, Any],
) -> tuple[str, ...]:
    """What keeps an engine from loading these files; empty for a complete model.

    `names`: of all files. `headers`: of the safetensors files, by name. `index`: of the shards, where there is one.
    """
    return tuple(_absent(names, tokenizer_config)) + tuple(_index(headers, index)) + tuple(_shape(headers, config))


def _absent(names: Collection[str], tokenizer_config: Mapping[str, Any]) -> Iterator[str]:
    for name in (CONFIG, "generation_config.json"):
        if name not in names:
            yield f"there is no {name}"
    if not any(tokenizer <= set(names) for tokenizer in TOKENIZERS):
        yield "there is no tokenizer: tokenizer.json, tokenizer.model, tekken.json, or vocab.json with merges.txt"
    if not any(name in names for name in CHAT_TEMPLATES) and not tokenizer_config.get("chat_template"):
        yield "there is no chat template: chat_template.jinja, or chat_template in tokenizer_config.json"
    if not any(name.endswith(WEIGHTS) for name in names):
        yield "there is no .safetensors file"


def _index(headers: Mapping[str, Header], index: Mapping[str, Any] | None) -> Iterator[str]:
    if index is None:
        if len(headers) > 1:
            yield f"there are {len(headers)} shards and no {INDEX}"
        return
    where = index.get("weight_map")
    if not isinstance(where, dict) or not where:
        yield f"{INDEX} has no weight_map"
        return
    there = {tensor.name: shard for shard, header in headers.items() for tensor in header.tensors}
    for shard in sorted(set(where.values()) - headers.keys()):
        yield f"{INDEX} names {shard}, which is not there"
    misplaced = sorted(t for t, shard in where.items() if shard in headers and there.get(t) != shard)
    if misplaced:
        yield f"{INDEX} has tensor {misplaced[0]!r} in {where[misplaced[0]]}, which has it not ({len(misplaced)} such)"
    unnamed = sorted(there.keys() - where.keys())
    if unnamed:
        yield f"{INDEX} does not name tensor {unnamed[0]!r} of {there[unnamed[0]]} ({len(unnamed)} such)"
    total, held = (index.get("metadata") or {}).get("total_size"), sum(h.data_bytes for h in headers.values())
    if isinstance(total, int) and total != held and not misplaced and not unnamed:
        yield f"{INDEX} says {total:,} bytes of tensors, and the shards hold {held:,}"


def _shape(headers: Mapping[str, Header], config: Mapping[str, Any]) -> Iterator[str]:
    expected, found = expected_parameters(config), sum(header.parameters for header in headers.values())
    if expected is not None and headers and found not in expected:
        yield f"{CONFIG} describes a model of {expected[0]:,} parameters, and the shards hold {found:,}"


DENSE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Architectures whose parameters follow from these fields of their config."""


def expected_parameters(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """How many parameters a dense decoder has, with tied embeddings stored once or twice; None: not known for it."""
    architectures = config.get("architectures") or [None]
    if architectures[0] not in DENSE or config.get("quantization_config"):
        return None
    try:
        hidden, layers, inner = (config[name] for name in ("hidden_size", "num_hidden_layers", "intermediate_size"))
        heads, vocabulary = config["num_attention_heads"], config["vocab_size"]
        kv_heads = config.get("num_key_value_heads") or heads
        head = config.get("head_dim") or hidden // heads
    except KeyError:
        return None
    qwen2, qwen3 = (architectures[0] == name for name in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"))
    queries, keys = heads * head, kv_heads * head
    attention = 2 * hidden * queries + 2 * hidden * keys
    if qwen2 or config.get("attention_bias"):
        attention += queries + 2 * keys + (0 if qwen2 else hidden)
    if qwen3:
        attention += 2 * head
    mlp = 3 * hidden * inner + ((2 * inner + hidden) if config.get("mlp_bias") else 0)
    embedding = vocabulary * hidden
    body = layers * (attention + mlp + 2 * hidden) + hidden + embedding
    return (body, body + embedding) if config.get("tie_word_embeddings") else (body + embedding,)


@dataclass(frozen=True, slots=True)
class StageStep:
    """One file, and how it gets to its place."""

    file: StagedFile
    how: Literal["keep", "copy", "send"]
    copied_from: str = ""
    """Key of an object with the same content."""


def plan_stage(
    files: Sequence[StagedFile], there: Mapping[str, tuple[int, str]], elsewhere: Mapping[str, str]
) -> tuple[StageStep, ...]:
    """What staging has to do, largest files first.

    `there`: (bytes, sha256) of objects at the stage by file name. `elsewhere`: keys of complete stages by sha256.
    """
    steps = []
    for file in sorted(files, key=lambda file: -file.bytes):
        if there.get(file.name) == (file.bytes, file.sha256):
            steps.append(StageStep(file, "keep"))
        elif file.sha256 in elsewhere:
            steps.append(StageStep(file, "copy", elsewhere[file.sha256]))
        else:
            steps.append(StageStep(file, "send"))
    return tuple(steps)


def damage(manifest: Manifest, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """What a listing of a stage says against its manifest: missing, truncated and extra objects.

    `sizes`: bytes of the objects by file name, the manifest apart.
    """
    found = []
    for file in manifest.files:
        if file.name not in sizes:
            found.append(f"{file.name} is missing")
        elif sizes[file.name] != file.bytes:
            found.append(f"{file.name} has {sizes[file.name]:,} bytes, not {file.bytes:,}")
    extra = sizes.keys() - {file.name for file in manifest.files}
    return (*found, *(f"{name} does not belong to it" for name in sorted(extra)))


def stage_path(model: str, digest: str) -> str:
    """Where a stage is, below the root of all stages."""
    return f"models/{model}/{digest}"


def streamed_path(uri: str, assets_cache: str) -> str:
    """The model string that vLLM puts into KV keys for weights at `uri`.

    vLLM 0.32 takes `$VLLM_ASSETS_CACHE/model_streamer/<first 8 hex digits of sha256(URI)>` for the model's directory.
    """
    return f"{assets_cache.rstrip('/')}/model_streamer/{sha256(uri.encode()).hexdigest()[:8]}"
