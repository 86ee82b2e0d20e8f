"""What warming costs and what it brings, on a real engine: vLLM, LMCache and Valkey with the sample model and prompts.

One engine is started, in a state directory of its own, and serves every figure here. Whatever is to be cold gets a
`cache_salt` that nothing was stored under, or L0 and L1 are dropped before it.
"""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
from benchmarks.registry import benchmark

from resources.config import load_settings
from resources.replicas import HttpReplica
from resources.workspace import Workspace
from warmers.fleet import Fleet, require_match
from warmers.plan import Step, WarmPlan
from warmers.prefixes import Prefix, PrefixSet, Usage
from warmers.proof import prove
from warmers.replica import Counters
from warmers.warm import WarmResult, warm

EMBEDDED = Path("deploy/local/warmfront.yaml")
TURNS = 5
TURN_TOKENS = 5_000
"""Prefilled in each turn of the comparison with raw prefill: a dozen seconds on two cores."""
READ_TOKENS, READS = 1_900, 5
SETTLE_S = 30.0


@benchmark(
    "ttft_speedup",
    "hit_share",
    "computed_over_unique",
    "noop_tokens",
    "warm_over_raw_prefill",
    "l2_read_ms_1900_tokens",
)
def warming(directory: Path) -> dict[str, float]:
    """Warm the sample prompts, warm them again, compare with raw prefill, and ask for them as the proof does."""
    workspace = Workspace(_config(directory), on_event=lambda message: print(message, file=sys.stderr, flush=True))
    try:
        fleet = workspace.fleet()
        with workspace.replicas(fleet.name).warmer(fleet) as replica:
            require_match(fleet, replica.engine.identity(), replica.daemon_identity())
            prefixes = workspace.find_prefixes(fleet, workspace.templates(fleet), replica.engine)
            bench = Bench(workspace, fleet, replica, prefixes)
            return bench.first_and_second_warm() | bench.against_raw() | bench.samples() | bench.l2_read()
    finally:
        workspace.stack.down()


@dataclass(frozen=True, slots=True)
class Bench:
    """A running engine and the prefixes to warm on it."""

    workspace: Workspace
    fleet: Fleet
    replica: HttpReplica
    prefixes: PrefixSet

    def first_and_second_warm(self) -> dict[str, float]:
        """Tokens by vLLM's own count; none is taken off for last tokens, since no planned request is all cached."""
        before = self.replica.counters()
        plan, result = self.warm(self.prefixes)
        self._settle("vLLM's count", lambda: self._computed(before) >= result.computed_tokens)
        computed = self._computed(before)
        before = self.replica.counters()
        again, second = self.warm(self.prefixes)
        if again.steps or second.requests:
            print(f"the second warm sent {second.requests} requests", file=sys.stderr)
            self._settle("vLLM's count", lambda: self._computed(before) >= second.computed_tokens)
        return {"computed_over_unique": computed / plan.compute_tokens, "noop_tokens": self._computed(before)}

    def against_raw(self) -> dict[str, float]:
        """`warm` over the same requests sent back to back by as many threads, shared starts first.

        Both under fresh salts with the connector on. Turns alternate in who is first and wait until all that was
        computed is in L2 (untimed), so neither pays for the other's writes; of each, the median of the turns counts.
        Both compute a little less than is planned: vLLM's own cache also hits shared blocks smaller than a chunk.
        """
        some = self._some()
        warms, raws = [], []
        for turn in range(TURNS):
            for kind in ("warm", "raw") if turn % 2 == 0 else ("raw", "warm"):
                mine = PrefixSet(tuple(replace(p, salt=f"{kind}-{turn}") for p in some))
                plan = self.workspace.plan(self.fleet, mine)
                self.replica.forget()
                started = self.workspace.clock.now()
                if kind == "warm":
                    _, result = self.warm(mine)
                    computed = result.computed_tokens
                else:
                    computed = self.prefill(plan)
                (warms if kind == "warm" else raws).append(self.workspace.clock.now() - started)
                if not 0.95 * plan.compute_tokens <= computed <= plan.compute_tokens:
                    raise AssertionError(f"{kind} computed {computed} tokens of {plan.compute_tokens} planned")
                self._forget_chunks(plan)
        print(f"warm {warms} s, raw {raws} s", file=sys.stderr)
        return {"warm_over_raw_prefill": median(warms) / median(raws)}

    def samples(self) -> dict[str, float]:
        """The proof's: L0 and L1 dropped before each L2 sample, the control cold under a salt of its own.

        The engine is not a new one, which the proof as a whole calls inconclusive; no figure here depends on it.
        """
        workspace, fleet = self.workspace, self.fleet
        plan, templates = workspace.plan(fleet, self.prefixes), workspace.templates(fleet).by_label()
        store, journal = workspace.store(fleet.name), workspace.state.journal(fleet.namespace)
        with workspace.lease(fleet.namespace) as fence:
            proof = prove(plan, templates, self.replica, store, journal, fence, workspace.clock, workspace.on_event)
        unclear = [f"{p.label}: {p.reason}" for p in proof.prefixes if p.verdict == "inconclusive"]
        if unclear or not proof.output_unchanged:
            raise RuntimeError(f"the samples say nothing: {'; '.join(unclear) or 'answers changed'}")
        return {"ttft_speedup": proof.speedup, "hit_share": proof.hit_rate}

    def l2_read(self) -> dict[str, float]:
        """TTFT of an L2 hit minus TTFT of the L0 hit right after it, median; between 7 and 8 chunks by a straight line.

        The same request both times, so what is left is asking LMCache and bringing the chunks from Valkey to L0.
        """
        chunk = self.fleet.engine.chunk_tokens
        below = READ_TOKENS // chunk
        prefix = next(
            p for p in self.prefixes.prefixes if p.chunks > below and len(p.rendered) > (below + 1) * chunk + 8
        )
        at = [median(self._read_s(prefix, chunks) for _ in range(READS)) for chunks in (below, below + 1)]
        added = np.interp(READ_TOKENS, [below * chunk, (below + 1) * chunk], at)
        return {"l2_read_ms_1900_tokens": float(added) * 1000}

    def warm(self, prefixes: PrefixSet) -> tuple[WarmPlan, WarmResult]:
        """As the asset `warm_chunks` does."""
        workspace, fleet = self.workspace, self.fleet
        with workspace.lease(fleet.namespace) as fence:
            plan = workspace.plan(fleet, prefixes)
            journal, store = workspace.state.journal(fleet.namespace), workspace.store(fleet.name)
            return plan, warm(plan, self.replica, store, journal, fence, workspace.clock)

    def prefill(self, plan: WarmPlan) -> int:
        """The plan's requests and nothing else; tokens that the engine says it computed."""
        sent: list[Future[Usage]] = []

        def send(step: Step) -> Usage:
            if step.after is not None:
                sent[step.after].result()
            prefix = plan.prefixes[step.prefix]
            return self.replica.engine.prefill(prefix.ids[: step.end * prefix.chunk_tokens], prefix.salt)

        with ThreadPoolExecutor(self.fleet.limits.concurrency) as pool:
            for step in plan.steps:
                sent.append(pool.submit(send, step))
        usages = [request.result() for request in sent]
        return sum(usage.prompt_tokens - usage.cached_tokens for usage in usages)

    def _some(self) -> Sequence[Prefix]:
        """The first prefixes, as many as a turn may take."""
        ends = np.cumsum([p.full_tokens for p in self.prefixes.prefixes])
        return self.prefixes.prefixes[: int(np.searchsorted(ends, TURN_TOKENS)) + 1]

    def _read_s(self, prefix: Prefix, chunks: int) -> float:
        tokens = chunks * prefix.chunk_tokens
        ids = prefix.rendered[: tokens + 8]
        self.replica.forget()
        before = self.replica.counters()
        cold = self.replica.generate(ids, max_tokens=1, salt=prefix.salt or None)
        self._settle("an L2 hit", lambda: (self.replica.counters() - before).external == tokens)
        warm = self.replica.generate(ids, max_tokens=1, salt=prefix.salt or None)
        if warm.cached_tokens < tokens:
            raise AssertionError(f"the request after it hit {warm.cached_tokens} of {tokens} tokens in L0")
        return cold.ttft_s - warm.ttft_s

    def _computed(self, before: Counters) -> int:
        return (self.replica.counters() - before).computed

    def _forget_chunks(self, plan: WarmPlan) -> None:
        """Wait until the turn's chunks are in L2, then delete them: Valkey holds a few turns, not all."""
        store = self.workspace.store(self.fleet.name)
        names = plan.tree.names
        self._settle("chunks in L2", lambda: bool((store.sizes(names) == self.fleet.chunk_bytes).all()))
        store.delete(names)

    def _settle(self, what: str, done: Callable[[], bool]) -> None:
        clock = self.workspace.clock
        deadline = clock.now() + SETTLE_S
        while not done():
            if clock.now() > deadline:
                raise RuntimeError(f"{what}: not seen within {SETTLE_S:g} s")
            clock.sleep(0.05)


def _config(directory: Path) -> Path:
    """The embedded configuration with a state of its own. Raises where the model or the engine is missing."""
    settings = load_settings(EMBEDDED.absolute())
    if not settings.local.engine_python.exists():
        raise RuntimeError(f"there is no engine environment {settings.local.engine_python}: run `make`")
    local = settings.local.model_copy(update={"directory": directory})
    path = directory / "warmfront.yaml"
    path.write_text(settings.model_copy(update={"state": str(directory), "local": local}).model_dump_json())
    return path
