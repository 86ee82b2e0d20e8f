"""A fleet: everything its replicas have in common that shapes KV, and the namespace that follows.

Settings files, adapters and addresses do not belong here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Literal

from warmers.errors import EngineMismatch

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
        ("LMCache's version", spec.lmcache, daemon.lmcache),
        ("LMCache's chunk size", spec.chunk_tokens, daemon.chunk_tokens),
        ("LMCache's hash algorithm", spec.hash_algorithm, daemon.hash_algorithm),
        ("LMCache's L2 key prefix or directory", ("" if fleet.store == "s3" else fleet.namespace,), daemon.namespaces),
    ]
    found = [f"{what} is {seen!r}, not {want!r}" for what, want, seen in pairs if seen is not None and seen != want]
    if engine.connector == "":
        found.append("vLLM runs without a KV connector, so nothing it computes reaches L2")
    elif fleet.model.path not in daemon.engines:
        found.append("no engine of this model has registered with the LMCache daemon (connector in degraded mode?)")
    if found:
        raise EngineMismatch(
            f"warming fleet {fleet.name!r} (namespace {fleet.namespace})",
            seen="; ".join(found),
            do="Nothing was sent. Start this fleet's own engine and daemon, or correct the fleet in warmfront.yaml.",
        )
