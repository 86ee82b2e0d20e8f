"""What an engine waits for when its prefix is in L2 alone, by tier."""

import numpy as np
from benchmarks.engine import WarmEngine, engine_on_files, engine_on_plugin, warm_engine
from benchmarks.registry import benchmark

from warmers.prefixes import Prefix

READ_TOKENS, READS = 1_900, 15


@benchmark("l2_read_ms_1900_tokens", on=warm_engine)
def from_valkey(engine: WarmEngine) -> dict[str, float]:
    """Through LMCache's own adapter, plain."""
    return {"l2_read_ms_1900_tokens": _read_ms(engine)}


@benchmark("l2_read_ms_1900_tokens_fs", on=engine_on_files)
def from_files(engine: WarmEngine) -> dict[str, float]:
    """From this machine's disk, or rather its page cache."""
    return {"l2_read_ms_1900_tokens_fs": _read_ms(engine)}


@benchmark("l2_read_ms_1900_tokens_plugin", on=engine_on_plugin)
def from_plugin(engine: WarmEngine) -> dict[str, float]:
    """Through warmfront's adapter, over TLS."""
    return {"l2_read_ms_1900_tokens_plugin": _read_ms(engine)}


def _read_ms(engine: WarmEngine) -> float:
    """TTFT of an L2 hit less TTFT of the L0 hit of the same request, each the fastest of 15, taken in turns.

    What is left is asking LMCache and bringing the chunks from L2 to L0. Taken at 7 and at 8 chunks of 256; 1,900
    tokens lie between, on a straight line. The fastest, since the machine's noise is several times what is measured.
    """
    chunk = engine.fleet.engine.chunk_tokens
    lengths = [READ_TOKENS // chunk * chunk, (READ_TOKENS // chunk + 1) * chunk]
    prefix = next(p for p in engine.prefixes.prefixes if p.full_tokens >= lengths[1])
    added = [_read_s(engine, prefix, length) for length in lengths]
    return 1000 * float(np.interp(READ_TOKENS, lengths, added))


def _read_s(engine: WarmEngine, prefix: Prefix, tokens: int) -> float:
    """What reading the first `tokens` of a prefix from L2 adds, in seconds.

    Reads that LMCache was not asked for do not count: vLLM's connector takes a daemon that is slow to answer for gone.
    """
    replica, ids, salt = engine.replica, prefix.rendered[: tokens + 8], prefix.salt or None
    from_l2, from_l0 = [], []
    for _ in range(3 * READS):
        replica.forget()
        before = replica.counters()
        first = replica.generate(ids, max_tokens=1, salt=salt)
        second = replica.generate(ids, max_tokens=1, salt=salt)
        engine.settled(lambda before=before: (replica.counters() - before).local_hit >= tokens)
        counted = replica.counters() - before
        if counted.external == counted.local_hit == tokens:
            from_l2.append(first.ttft_s)
            from_l0.append(second.ttft_s)
        if len(from_l2) == READS:
            return min(from_l2) - min(from_l0)
    raise RuntimeError(f"{len(from_l2)} of {3 * READS} reads of {tokens} tokens came from L2, {READS} are needed")
