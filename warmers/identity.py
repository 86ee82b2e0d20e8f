"""What a running engine and daemon say of themselves, and whether that is the fleet's: nothing is sent to others."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from warmers.errors import EngineMismatch
from warmers.fleet import Fleet

Pair = tuple[str, object, object]
"""What it is; what it has to be; what was seen."""


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
