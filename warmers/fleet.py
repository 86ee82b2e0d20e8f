"""A fleet: everything its replicas have in common that shapes KV, and the namespace that follows.

Settings files, adapters and addresses do not belong here.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Literal

from warmers.errors import EngineMismatch
from warmers.salts import Adapter, salt_table, table_digest

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
StoreKind = Literal["valkey", "fs", "s3"]


@dataclass(frozen=True, slots=True)
class KVShape:
    """What decides the size of a KV chunk; from the model's config.json."""

    layers: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Model:
    """The model as the fleet serves it.

    `served_name` is what clients put into "model"; `path` is the string that LMCache puts into every key, so it has to
    be the same, to the letter, on every replica: the directory that vLLM loads, or the one that it makes for a stage.
    """

    served_name: str
    path: str
    weights_digest: str
    tokenizer_digest: str
    shape: KVShape
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    stage_uri: str = ""
    """Where replicas stream the weights from; empty where they load a directory, `path`."""

    @property
    def assets_cache(self) -> str:
        """VLLM_ASSETS_CACHE of replicas that stream: what vLLM puts before `model_streamer/<hash>` in `path`."""
        return self.path.rpartition("/model_streamer/")[0]

    @property
    def argument(self) -> str:
        """What vLLM gets as --model."""
        return self.stage_uri or self.path


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How the replicas run. Two fleets that differ in any field cannot share KV."""

    vllm: str
    lmcache: str
    dtype: str
    tensor_parallel: int = 1
    block_tokens: int = 128
    chunk_tokens: int = 256
    max_model_len: int = 8192
    kv_cache_dtype: str = "auto"
    attention_backend: str = "auto"
    hash_algorithm: str = "blake3"

    @property
    def kv_dtype_bytes(self) -> int:
        """Bytes of one number in the KV cache."""
        name = self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype
        return DTYPE_BYTES[name.partition("_")[0]]


@dataclass(frozen=True, slots=True)
class WarmLimits:
    """Bounds on one warming run."""

    concurrency: int = 2
    """Prefill requests under way at once."""
    request_timeout_s: float = 300.0
    """One prefill; a hung engine is found after this long."""
    visible_deadline_s: float = 60.0
    """LMCache writes behind: how long after a prefill its chunks may take to appear in L2."""
    unflushed_bytes: int = 1 << 30
    """Prefilled but not yet seen in L2; kept well under L1, which would evict them unsaved."""
    max_tokens_per_run: int | None = None
    """Cap on computed tokens; None: no cap. What is left over is planned by the next run."""


@dataclass(frozen=True, slots=True)
class ProofFloors:
    """What a proof has to reach, and how it is sampled."""

    hit_rate: float = 1.0
    ttft_speedup: float = 3.0
    samples: int = 3
    """L2-hit requests per prefix; TTFT is their median."""
    controls: int = 1
    """Cold control requests per prefix."""
    max_prefixes: int = 32
    """Proven per run: longest unproven first. The rest keep the proof they have."""
    output_tokens: int = 8
    """Greedy tokens that are compared."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Replicas that are alike in everything that shapes KV."""

    name: str
    model: Model
    engine: EngineSpec
    store: StoreKind = "valkey"
    ttl_s: int | None = 7 * 86400
    """After which L2 forgets a chunk that nobody refreshes; None: it never does by itself."""
    budget_bytes: int | None = None
    """What its warmed chunks may take in L2, over all ranks; None: no bound."""
    adapters: tuple[Adapter, ...] = ()
    """LoRA adapters that it serves beside the model. Not in the namespace: each has a salt."""
    limits: WarmLimits = field(default_factory=WarmLimits)
    floors: ProofFloors = field(default_factory=ProofFloors)
    prefill_tokens_per_s: float | None = None
    """Measured by the last warming run; None before the first."""

    @property
    def namespace(self) -> str:
        """`<fleet>-<16 hex>`: in L2's keys or paths. Changes when anything does that makes KV incompatible."""
        shaping = {
            "model": self.model.path if self.store != "s3" else "",  # there the path has the namespace in it
            "weights": self.model.weights_digest,
            "vllm": self.engine.vllm,
            "lmcache": self.engine.lmcache,
            "dtype": self.engine.dtype,
            "kv_cache_dtype": self.engine.kv_cache_dtype,
            "tensor_parallel": self.engine.tensor_parallel,
            "block_tokens": self.engine.block_tokens,
            "chunk_tokens": self.engine.chunk_tokens,
            "attention_backend": self.engine.attention_backend,
            "hash_algorithm": self.engine.hash_algorithm,
            "shape": [self.model.shape.layers, self.model.shape.kv_heads, self.model.shape.head_dim],
        }
        digest = sha256(json.dumps(shaping, sort_keys=True).encode()).hexdigest()
        return f"{self.name}-{digest[:16]}"

    def adapter(self, name: str | None) -> Adapter | None:
        """The adapter of that name; None where there is none, as for the model's own."""
        return next((adapter for adapter in self.adapters if adapter.name == name), None)

    @property
    def keyspace(self) -> str:
        """The namespace, and the table of salts where there is one: changes when some prefix gets other keys."""
        return f"{self.namespace}+{self.salt_table_digest}" if self.adapters else self.namespace

    @property
    def salt_table(self) -> bytes:
        """What its engines' middleware has to read."""
        return salt_table(self.model.served_name, self.adapters)

    @property
    def salt_table_digest(self) -> str:
        """How engines call it."""
        return table_digest(self.salt_table)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk for one rank: keys and values of every layer, raw, without a header."""
        shape, engine = self.model.shape, self.engine
        heads = max(1, shape.kv_heads // engine.tensor_parallel)
        return shape.layers * 2 * heads * shape.head_dim * engine.chunk_tokens * engine.kv_dtype_bytes


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """What a running engine says of itself; None where it does not say."""

    model_path: str
    vllm: str
    max_model_len: int
    dtype: str | None = None
    block_tokens: int | None = None
    tensor_parallel: int | None = None
    kv_cache_dtype: str | None = None
    connector: str | None = None
    adapters: tuple[str, ...] = ()
    """LoRA adapters that it serves, by name."""
    salt_table: str | None = None
    """Digest of the table that its middleware has in force; None: it has no such middleware."""


@dataclass(frozen=True, slots=True)
class DaemonIdentity:
    """What a running LMCache daemon says of itself."""

    lmcache: str
    chunk_tokens: int
    hash_algorithm: str
    namespaces: tuple[str, ...]
    """Of every L2 adapter: its key prefix, or the last part of its directory; "" where it has neither, as on S3."""
    engines: tuple[str, ...]
    """Model paths of the engines that have registered."""


def require_match(fleet: Fleet, engine: EngineIdentity, daemon: DaemonIdentity) -> None:
    """Raise EngineMismatch, naming every difference, unless both are of the fleet's namespace.

    A daemon of another namespace would store KV where another fleet, or other weights, find it.
    """
    spec = fleet.engine
    pairs = [
        ("vLLM's --model", fleet.model.argument, engine.model_path),
        ("vLLM's version", spec.vllm, engine.vllm),
        ("vLLM's dtype", spec.dtype, engine.dtype),
        ("vLLM's KV cache dtype", spec.kv_cache_dtype, engine.kv_cache_dtype),
        ("vLLM's block size", spec.block_tokens, engine.block_tokens),
        ("vLLM's tensor parallel size", spec.tensor_parallel, engine.tensor_parallel),
        *_of_daemon(fleet, daemon),
    ]
    found = [*_differing(pairs), *_salts_missing(fleet, engine)]
    if engine.connector == "":
        found.append("vLLM runs without a KV connector, so nothing it computes reaches L2")
    elif fleet.model.path not in daemon.engines:
        found.append("no engine of this model has registered with the LMCache daemon (connector in degraded mode?)")
    _refuse(fleet, found)


def require_daemon(fleet: Fleet, daemon: DaemonIdentity) -> None:
    """Raise EngineMismatch, naming every difference, unless the daemon is of the fleet's namespace."""
    _refuse(fleet, list(_differing(_of_daemon(fleet, daemon))))


Pair = tuple[str, object, object]
"""What it is; what it has to be; what was seen."""


def _of_daemon(fleet: Fleet, daemon: DaemonIdentity) -> list[Pair]:
    spec = fleet.engine
    return [
        ("LMCache's version", spec.lmcache, daemon.lmcache),
        ("LMCache's chunk size", spec.chunk_tokens, daemon.chunk_tokens),
        ("LMCache's hash algorithm", spec.hash_algorithm, daemon.hash_algorithm),
        ("LMCache's L2 key prefix or directory", ("" if fleet.store == "s3" else fleet.namespace,), daemon.namespaces),
    ]


def _differing(pairs: Iterable[Pair]) -> Iterator[str]:
    return (f"{what} is {seen!r}, not {want!r}" for what, want, seen in pairs if seen is not None and seen != want)


def _refuse(fleet: Fleet, found: Sequence[str]) -> None:
    if found:
        raise EngineMismatch(
            f"asking engine and daemon of fleet {fleet.name!r} (namespace {fleet.namespace})",
            seen="; ".join(found),
            do="Nothing was sent. Start this fleet's own engine and daemon, or correct the fleet in warmfront.yaml.",
        )


def _salts_missing(fleet: Fleet, engine: EngineIdentity) -> Iterator[str]:
    """Adapters without a salt answer from one another's KV, silently."""
    declared = {adapter.name for adapter in fleet.adapters}
    if unknown := sorted(set(engine.adapters) - declared):
        yield f"vLLM serves the LoRA adapter {', '.join(unknown)}, which is not in model.adapters and so has no salt"
    if absent := sorted(declared - set(engine.adapters)):
        yield f"vLLM does not serve the LoRA adapter {', '.join(absent)} of model.adapters"
    if declared and engine.salt_table != fleet.salt_table_digest:
        wanted = f"vLLM's table of salts has to be {fleet.salt_table_digest} (WARMFRONT_SALTS), and"
        yield f"{wanted} {f'it is {engine.salt_table}' if engine.salt_table else 'its middleware is not on'}"
