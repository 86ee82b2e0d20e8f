"""What warming costs and what it brings, on a real engine."""

import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from statistics import median

import numpy as np
from benchmarks.engine import WarmEngine, warm_engine
from benchmarks.registry import benchmark

from warmers.ledger import Rows
from warmers.observation import Sample, observe
from warmers.plan import Step, WarmPlan
from warmers.prefixes import Prefix, PrefixSet, Usage
from warmers.proof import choose, judge

TURNS, TURN_TOKENS = 4, 5_000
"""Of the comparison with raw prefill: a dozen seconds of two cores for each of the two, in each turn."""


@benchmark("computed_over_unique", "noop_tokens", on=warm_engine)
def tokens(engine: WarmEngine) -> dict[str, float]:
    """By vLLM's own count. No last token is taken off: no planned request is found whole in a cache."""
    again = engine.warm(engine.prefixes)
    return {
        "computed_over_unique": engine.first.computed_tokens / engine.first.plan.compute_tokens,
        "noop_tokens": again.computed_tokens,
    }


@benchmark("warm_over_raw_prefill", on=warm_engine)
def against_raw(engine: WarmEngine) -> dict[str, float]:
    """All of `warm` (plan, lease, prefill, waiting for L2, ledger) over the same requests sent back to back.

    As many requests at once in both, shared starts first, under fresh salts, with the connector on. Turns alternate
    in who is first and wait until all that was computed is in L2 (untimed), so neither pays for the other's writes. Of
    each, the fastest of four turns counts: whatever else runs on the machine can only slow a turn down. Both compute a
    little less than is planned: vLLM's own cache also hits shared blocks that are smaller than a chunk.
    """
    seconds: dict[str, list[float]] = {"warm": [], "raw": []}
    some = _some(engine.prefixes.prefixes)
    for turn in range(TURNS):
        for kind in sorted(seconds, reverse=turn % 2 == 0):
            mine = PrefixSet(tuple(replace(p, salt=f"{kind}-{turn}") for p in some))
            plan = engine.workspace.plan(engine.fleet, mine)
            engine.replica.forget()
            started = time.perf_counter()
            computed = engine.warm(mine).result.computed_tokens if kind == "warm" else _prefill(engine, plan)
            seconds[kind].append(time.perf_counter() - started)
            if not 0.95 * plan.compute_tokens <= computed <= plan.compute_tokens:
                raise AssertionError(f"{kind} computed {computed} tokens of {plan.compute_tokens} planned")
            _drop(engine, plan)
    print({kind: [round(s, 1) for s in taken] for kind, taken in seconds.items()}, file=sys.stderr)
    return {"warm_over_raw_prefill": min(seconds["warm"]) / min(seconds["raw"])}


@benchmark("ttft_speedup", "hit_share", on=warm_engine)
def samples(engine: WarmEngine) -> dict[str, float]:
    """As the proof takes them: L0 and L1 dropped before each L2 sample, the control cold under a salt of its own.

    TTFT is each prefix's fastest, of three hits and of one control; the figure is the median over prefixes. The engine
    is not a new one, as a proof would ask for; no figure here depends on it.
    """
    workspace, fleet = engine.workspace, engine.fleet
    plan, templates = workspace.plan(fleet, engine.prefixes), workspace.templates(fleet).by_label()
    chosen = choose(plan, Rows.empty(), templates)
    store = workspace.store(fleet.name)
    seen = observe(plan, chosen, templates, engine.replica, store, workspace.clock, workspace.on_event)
    proof = judge(replace(seen, fresh=True), fleet.floors)
    if proof.verdict == "inconclusive" or not proof.output_unchanged:
        raise RuntimeError(f"the samples say nothing: {'; '.join(proof.reasons)}")
    speedups = [_fastest(one.controls) / _fastest(one.hits) for one in seen.prefixes]
    return {"ttft_speedup": median(speedups), "hit_share": proof.hit_rate}


def _fastest(samples: Sequence[Sample]) -> float:
    return min(sample.answer.ttft_s for sample in samples)


def _some(prefixes: Sequence[Prefix]) -> Sequence[Prefix]:
    """The first of them, as many as make up a turn."""
    ends = np.cumsum([p.full_tokens for p in prefixes])
    return prefixes[: int(np.searchsorted(ends, TURN_TOKENS)) + 1]


def _prefill(engine: WarmEngine, plan: WarmPlan) -> int:
    """The plan's requests and nothing else; tokens that the engine says it computed."""
    sent: list[Future[Usage]] = []

    def send(step: Step) -> Usage:
        if step.after is not None:
            sent[step.after].result()
        prefix = plan.prefixes[step.prefix]
        return engine.replica.engine.prefill(prefix.ids[: step.end * prefix.chunk_tokens], prefix.salt)

    with ThreadPoolExecutor(engine.fleet.limits.concurrency) as pool:
        for step in plan.steps:
            sent.append(pool.submit(send, step))
    usages = [request.result() for request in sent]
    return sum(usage.prompt_tokens - usage.cached_tokens for usage in usages)


def _drop(engine: WarmEngine, plan: WarmPlan) -> None:
    """Wait until a turn's chunks are in L2, then delete them: it need not hold all turns."""
    store, size = engine.workspace.store(engine.fleet.name), engine.fleet.chunk_bytes
    engine.settled(lambda: bool((store.sizes(plan.tree.names) == size).all()))
    store.delete(plan.tree.names)
