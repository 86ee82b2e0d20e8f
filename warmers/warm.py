"""Carry a plan out: prefill what is missing, wait until it is in L2, write down what arrived.

The only module of the domain with threads: they send prefills and nothing else; every decision is made
by the one thread that called `warm`. Choosing what to prefill belongs in `warmers/plan.py`.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field

from warmers.errors import NotWarm, PermanentError, WarmfrontError
from warmers.fleet import WarmLimits
from warmers.lease import Fence
from warmers.ledger import Journal, rows_of, unknown_chunks
from warmers.plan import Step, WarmPlan, with_repairs
from warmers.prefixes import Usage
from warmers.presence import KVStore, look
from warmers.replica import Clock, Replica

POLL_S = 0.05
"""How often L2 is asked for chunks that LMCache is writing behind."""
RECORD_EVERY_S = 10.0
"""How much work a kill can make the ledger forget; the next run finds it in L2 all the same."""


@dataclass(frozen=True, slots=True)
class WarmResult:
    """What a run did."""

    computed_tokens: int
    """Prompt tokens that the engine computed, by its own count."""
    requests: int
    chunks: int
    """Chunks that are in L2 now and were not before."""
    already_there: int
    seconds: float
    failed: tuple[tuple[str, str], ...] = ()
    """(prefix, reason) of steps that the engine refused, and of those that waited for them."""
    refused_chunks: int = 0
    deferred_chunks: int = 0
    repaired_chunks: int = 0
    """Of those, chunks that LMCache had lost on the way to L2 and that were prefilled once more."""

    @property
    def tokens_per_s(self) -> float | None:
        """Prefill rate of the run; None when it computed nothing."""
        return self.computed_tokens / self.seconds if self.computed_tokens and self.seconds else None


@dataclass(frozen=True, slots=True)
class WarmProgress:
    """How far a run is."""

    chunks: int
    total_chunks: int
    computed_tokens: int
    seconds: float


OnProgress = Callable[[WarmProgress], None]


@dataclass(slots=True)
class _Run:
    """State of one call of `warm`; touched by its calling thread alone."""

    plan: WarmPlan
    waiting: list[int]
    done: set[int] = field(default_factory=set)
    failed: dict[int, str] = field(default_factory=dict)
    running: dict[Future[Usage], int] = field(default_factory=dict)
    unseen: dict[int, float] = field(default_factory=dict)
    """Chunk: deadline by which it has to be in L2."""
    lost: list[int] = field(default_factory=list)
    """Not in L2 at their deadline: LMCache never repeats a store that failed."""
    repairing: bool = False
    seen: list[int] = field(default_factory=list)
    unrecorded: list[int] = field(default_factory=list)
    computed_tokens: int = 0
    requests: int = 0

    def chunks_of(self, step: Step) -> list[int]:
        path: list[int] = self.plan.tree.paths[step.prefix][step.start : step.end].tolist()
        return path

    def unflushed_chunks(self) -> int:
        return len(self.unseen) + sum(self.plan.steps[number].chunks for number in self.running.values())

    def next_ready(self) -> int | None:
        """The first waiting step whose parent is done; steps whose parent failed fail with it."""
        for number in list(self.waiting):
            after = self.plan.steps[number].after
            if after in self.failed:
                self.waiting.remove(number)
                self.failed[number] = f"its shared start failed: {self.failed[after]}"
            elif after is None or after in self.done:
                return number
        return None


def warm(
    plan: WarmPlan,
    replica: Replica,
    store: KVStore,
    journal: Journal,
    fence: Fence,
    clock: Clock,
    on_progress: OnProgress = lambda _: None,
) -> WarmResult:
    """Make every chunk of `plan` present in L2, with its right size, on every rank.

    Raises NotWarm when prefilled chunks do not appear in L2 in time, EngineUnavailable, StoreUnavailable
    or LeaseLost; what arrived until then is in the ledger, and the next run plans only the rest. A step
    that the engine refuses is reported in the result and harms no other.
    """
    started = clock.now()
    complete = [int(chunk) for chunk in plan.presence.complete.nonzero()[0]]
    adopted = unknown_chunks(plan.tree, complete, journal.rows())
    run = _Run(plan, list(range(len(plan.steps))), unrecorded=adopted)
    if plan.steps:
        _clear_the_way(plan, replica, store)
        try:
            _execute(run, replica, store, journal, fence, clock, on_progress, started)
        finally:
            _record(run, journal, fence, clock)
    elif adopted:
        _record(run, journal, fence, clock)
    return WarmResult(
        computed_tokens=run.computed_tokens,
        requests=run.requests,
        chunks=len(run.seen),
        already_there=len(complete),
        seconds=clock.now() - started,
        failed=tuple((plan.prefixes[run.plan.steps[n].prefix].label, why) for n, why in sorted(run.failed.items())),
        refused_chunks=sum(run.plan.steps[n].chunks for n in run.failed),
        deferred_chunks=plan.deferred_chunks,
        repaired_chunks=len(run.lost),
    )


def _clear_the_way(plan: WarmPlan, replica: Replica, store: KVStore) -> None:
    """Delete values of a wrong size, which LMCache takes for present, and drop L0 and L1.

    A chunk that is missing in L2 but still in the warmer's own caches would be hit there and never stored.
    """
    names = plan.tree.names
    wrong = [names[i] for i in plan.presence.wrong.reshape(-1).nonzero()[0]]
    if wrong:
        store.delete(wrong)
    replica.forget()


def _execute(
    run: _Run,
    replica: Replica,
    store: KVStore,
    journal: Journal,
    fence: Fence,
    clock: Clock,
    on_progress: OnProgress,
    started: float,
) -> None:
    limits = run.plan.fleet.limits
    total = sum(step.chunks for step in run.plan.steps)
    recorded_at = started
    with ThreadPoolExecutor(limits.concurrency, "prefill") as pool:
        try:
            while run.waiting or run.running or run.unseen or _repair(run, replica, store, fence):
                fence.check()
                _submit(run, replica, pool, limits)
                if _collect(run, clock, limits) or _watch(run, replica, store, clock):
                    on_progress(WarmProgress(len(run.seen), total, run.computed_tokens, clock.now() - started))
                if run.unrecorded and clock.now() - recorded_at > RECORD_EVERY_S:
                    _record(run, journal, fence, clock)
                    recorded_at = clock.now()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            for future in [future for future in run.running if not future.cancelled()]:
                with suppress(WarmfrontError):
                    _take_in(run, [future], clock, limits)
            # An interrupt may have come between sending a prefill and noting it.
            for number in set(range(len(run.plan.steps))) - {*run.waiting, *run.done, *run.failed}:
                run.unseen.update(dict.fromkeys(run.chunks_of(run.plan.steps[number]), 0.0))
            with suppress(WarmfrontError):
                _look_once(run, store)
            raise


def _submit(run: _Run, replica: Replica, pool: ThreadPoolExecutor, limits: WarmLimits) -> None:
    """Send as many ready steps as the limits allow, always at least one when nothing is under way."""
    per_chunk = run.plan.fleet.chunk_bytes * run.plan.fleet.engine.tensor_parallel
    while len(run.running) < limits.concurrency:
        number = run.next_ready()
        if number is None:
            return
        step = run.plan.steps[number]
        unflushed = run.unflushed_chunks()
        if unflushed and (unflushed + step.chunks) * per_chunk > limits.unflushed_bytes:
            return
        run.waiting.remove(number)
        prefix = run.plan.prefixes[step.prefix]
        ids = prefix.ids[: step.end * prefix.chunk_tokens]
        run.running[pool.submit(replica.engine.prefill, ids, prefix.salt or None, prefix.adapter)] = number


def _collect(run: _Run, clock: Clock, limits: WarmLimits) -> bool:
    """Take in finished prefills, waiting a moment for one while there are any; whether one had finished."""
    if not run.running:
        if run.unseen:
            clock.sleep(POLL_S)
        return False
    finished, _ = wait(run.running, timeout=POLL_S, return_when=FIRST_COMPLETED)
    _take_in(run, finished, clock, limits)
    return bool(finished)


def _take_in(run: _Run, finished: Iterable[Future[Usage]], clock: Clock, limits: WarmLimits) -> None:
    for future in finished:
        number = run.running[future]
        try:
            usage = future.result()
        except PermanentError as error:
            run.failed[number] = str(error)
            del run.running[future]
            continue
        except BaseException:
            del run.running[future]
            raise
        deadline = clock.now() + limits.visible_deadline_s
        run.unseen.update(dict.fromkeys(run.chunks_of(run.plan.steps[number]), deadline))
        run.done.add(number)
        del run.running[future]  # last: what an interrupt leaves here is taken in before the run ends
        run.requests += 1
        run.computed_tokens += usage.prompt_tokens - usage.cached_tokens


def _look_once(run: _Run, store: KVStore) -> bool:
    """Move chunks that are in L2 now from unseen to seen; whether there were any."""
    chunks = list(run.unseen)
    names = list(run.plan.tree.names_of(chunks))
    fleet = run.plan.fleet
    complete = look(store, names, fleet.engine.tensor_parallel, fleet.chunk_bytes).complete
    arrived = [chunk for chunk, there in zip(chunks, complete, strict=True) if there]
    run.unrecorded += arrived
    for chunk in arrived:
        del run.unseen[chunk]
    run.seen += arrived
    return bool(arrived)


def _watch(run: _Run, replica: Replica, store: KVStore, clock: Clock) -> bool:
    """Look for chunks that LMCache is writing behind; whether any arrived.

    Past their deadline a few are set aside for a repair, one at the least. Raises NotWarm when most are late, or late
    again.
    """
    if not run.unseen:
        return False
    arrived = _look_once(run, store)
    late = [chunk for chunk, deadline in run.unseen.items() if clock.now() > deadline]
    if late and (run.repairing or len(run.lost) + len(late) > max(1, len(run.seen))):
        raise _not_warm(run, replica, late)
    for chunk in late:
        del run.unseen[chunk]
    run.lost += late
    return arrived


def _repair(run: _Run, replica: Replica, store: KVStore, fence: Fence) -> bool:
    """When all else is done, put steps for the lost chunks into the run, once; whether there were any."""
    if run.repairing or not run.lost:
        return False
    fence.check()
    first = len(run.plan.steps)
    run.plan, run.repairing = with_repairs(run.plan, run.lost), True
    run.waiting += range(first, len(run.plan.steps))
    store.delete(list(run.plan.tree.names_of(run.lost)))  # what is there of them is of a wrong size, or of one rank
    replica.forget()
    return True


def _not_warm(run: _Run, replica: Replica, late: list[int]) -> NotWarm:
    plan, counts = run.plan, replica.stores()
    first = plan.prefixes[plan.tree.owner[late[0]]].label
    name = next(plan.tree.names_of(late[:1]))
    if counts.submitted == 0:
        do = "The daemon was asked to store nothing: vLLM runs without its connector, or fell back to recompute."
    elif counts.completed < counts.submitted:
        do = "The daemon cannot write to L2: look at its log, and at the store's memory limit and reachability."
    else:
        do = "The daemon stored something else: compare its key prefix, model path and chunk size with the fleet's."
    return NotWarm(
        f"warming fleet {plan.fleet.name!r}",
        seen=f"{len(late)} prefilled chunks are not whole in L2 after {plan.fleet.limits.visible_deadline_s:g} s, the "
        f"first of prefix {first!r} (key {name}); the daemon submitted {counts.submitted} chunks and completed "
        f"{counts.completed}",
        do=do + " Run again: only what is missing is computed.",
    )


def _record(run: _Run, journal: Journal, fence: Fence, clock: Clock) -> None:
    """Write what arrived into the ledger, unless another writer has taken over."""
    if run.unrecorded:
        fence.check()
        journal.record(rows_of(run.plan, run.unrecorded, warmed_at=clock.now()))
        run.unrecorded.clear()
