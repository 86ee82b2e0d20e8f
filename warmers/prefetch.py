"""Bring warmed chunks from L2 into one replica's L1, by its daemon's own prefetch: the first request finds them there.

A chunk that a request loads from L2 does not stay in L1 (LMCache 0.5.6), one that was prefetched does. Computing what
L2 lacks belongs in `warmers/warm.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from warmers.errors import EngineUnavailable
from warmers.hot_set import HotPrefix, HotSet
from warmers.replica import Clock

AT_ONCE = 4
"""Loads under way: enough to hide the trips to L2, few enough to leave the daemon's workers to users' requests."""
POLL_S = 0.02
"""A load of eight chunks takes about 30 ms on loopback."""
SHARE = 0.75
"""Of L1, for prefixes: LMCache evicts from 80 % on, and what requests compute needs room too."""


class Loader(Protocol):
    """A replica's LMCache daemon, as far as prefetching needs it."""

    def l1_bytes(self) -> int:
        """How large its L1 is."""

    def prefetch(self, hot: HotSet, prefix: HotPrefix) -> str:
        """Ask for every chunk of one prefix; the request's id. Raises EngineUnavailable before an engine is there."""

    def prefetched(self, request: str) -> tuple[int, int] | None:
        """Keys that are in L1 now, of how many; None while it loads. Answered once. Raises EngineUnavailable."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What became of one prefix."""

    label: str
    keys: int
    """Its chunks, times ranks."""
    in_l1: int

    @property
    def whole(self) -> bool:
        """Whether all of it is there."""
        return self.in_l1 == self.keys


@dataclass(frozen=True, slots=True)
class Prefetched:
    """What a prefetch did."""

    loaded: tuple[Loaded, ...]
    left_out: tuple[str, ...]
    """Labels of prefixes that L1 has no room for."""

    @property
    def whole(self) -> bool:
        """Whether every prefix that was asked for is in L1 now."""
        return not self.left_out and all(one.whole for one in self.loaded)


def prefetch(
    hot: HotSet,
    loader: Loader,
    clock: Clock,
    timeout_s: float,
    on_loaded: Callable[[Loaded], None] = lambda _: None,
) -> Prefetched:
    """Load the heaviest prefixes, as far as L1 goes, a few at a time.

    What L2 lacks is reported and stops nothing. Raises EngineUnavailable when the daemon goes, or one load takes longer
    than `timeout_s`.
    """
    chosen, left_out = hot.within(int(SHARE * loader.l1_bytes()))
    loaded = {one.label: one for one in _load(hot, chosen.prefixes, loader, clock, timeout_s, on_loaded)}
    lacking = [prefix for prefix in chosen.prefixes if not loaded[prefix.label].whole]
    # LMCache counts a key as not found that became resident while it looked: those are asked for once more.
    loaded |= {one.label: one for one in _load(hot, lacking, loader, clock, timeout_s, lambda _: None)}
    return Prefetched(tuple(loaded.values()), left_out)


def _load(
    hot: HotSet,
    prefixes: Sequence[HotPrefix],
    loader: Loader,
    clock: Clock,
    timeout_s: float,
    on_loaded: Callable[[Loaded], None],
) -> Iterator[Loaded]:
    waiting, under_way = list(prefixes), dict[str, tuple[HotPrefix, float]]()
    while waiting or under_way:
        _submit(hot, waiting, under_way, loader, clock.now() + timeout_s)
        for request, (prefix, deadline) in list(under_way.items()):
            answer = loader.prefetched(request)
            if answer is not None:
                del under_way[request]
                loaded = Loaded(prefix.label, keys=answer[1], in_l1=answer[0])
                on_loaded(loaded)
                yield loaded
            elif clock.now() > deadline:
                raise EngineUnavailable(
                    f"prefetching {prefix.label!r} of fleet {hot.fleet!r}",
                    seen=f"not loaded after {timeout_s:g} s",
                    do="Look at the daemon's log, and at L2's latency; then run it again.",
                )
        if under_way:
            clock.sleep(POLL_S)


def _submit(
    hot: HotSet,
    waiting: list[HotPrefix],
    under_way: dict[str, tuple[HotPrefix, float]],
    loader: Loader,
    deadline: float,
) -> None:
    """Ask for the next ones; of prefixes that begin alike one at a time, since each would get the same memory anew."""
    starts = {_start(prefix, hot.chunk_tokens) for prefix, _ in under_way.values()}
    later = []
    for prefix in waiting:
        start = _start(prefix, hot.chunk_tokens)
        if len(under_way) == AT_ONCE or start in starts:
            later.append(prefix)
        else:
            starts.add(start)
            under_way[loader.prefetch(hot, prefix)] = prefix, deadline
    waiting[:] = later


def _start(prefix: HotPrefix, chunk_tokens: int) -> tuple[str, bytes]:
    return prefix.key_salt, prefix.ids[:chunk_tokens].tobytes()
