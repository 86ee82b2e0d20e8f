"""A fleet: everything its replicas have in common that shapes KV, and the namespace that follows.

Settings files and addresses do not belong here; what runs is compared with it in `warmers/identity.py`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Literal

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
