"""Bring warmed chunks from L2 into one replica's L1, by its daemon's own prefetch: the first request finds them there.

A chunk that a request loads from L2 does not stay in L1 (LMCache 0.5.6), one that was prefetched does. Computing what
L2 lacks belongs in `warmers/warm.py`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from warmers.budget import afford
from warmers.errors import EngineUnavailable
from warmers.fleet import Fleet
from warmers.keys import TokenIds
from warmers.prefixes import Prefix
from warmers.replica import Clock

AT_ONCE = 4
POLL_S = 0.02
SHARE = 0.75
"""Of L1, for prefixes: LMCache evicts from 80 % on, and what requests compute needs room too."""


class Loader(Protocol):
    """A replica's LMCache daemon, as far as prefetching needs it."""

    def l1_bytes(self) -> int:
        """How large its L1 is."""

    def prefetch(self, ids: TokenIds, fleet: Fleet, salt: str) -> str:
        """Ask for every full chunk of `ids`; the request's id. Raises EngineUnavailable before an engine is there."""

    def prefetched(self, request: str) -> tuple[int, int] | None:
        """Keys that are in L1 now, of how many; None while it loads. Answered once. Raises EngineUnavailable."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What became of one prefix."""

    label: str
    keys: int
    """Its chunks, times ranks."""
    in_l1: int


@dataclass(frozen=True, slots=True)
class Prefetched:
    """What a prefetch did."""

    loaded: tuple[Loaded, ...]
    left_out: tuple[str, ...]
    """Labels of prefixes that L1 has no room for."""

    @property
    def whole(self) -> bool:
        """Whether every prefix that was asked for is in L1 now."""
        return not self.left_out and all(one.in_l1 == one.keys for one in self.loaded)


def prefetch(
    prefixes: Sequence[Prefix],
    fleet: Fleet,
    loader: Loader,
    clock: Clock,
    on_loaded: Callable[[Loaded], None] = lambda _: None,
) -> Prefetched:
    """Load the heaviest prefixes, as far as L1 goes, a few at a time.

    What L2 lacks is reported and stops nothing. Raises EngineUnavailable when the daemon goes, or one load takes longer
    than the fleet's request time-out.
    """
    room = int(SHARE * loader.l1_bytes())
    chosen, left_out = afford([p for p in prefixes if p.chunks], replace(fleet, budget_bytes=room))
    waiting, under_way = deque(chosen), dict[str, tuple[Prefix, float]]()
    loaded: list[Loaded] = []
    while waiting or under_way:
        while waiting and len(under_way) < AT_ONCE:
            prefix = waiting.popleft()
            request = loader.prefetch(prefix.ids[: prefix.full_tokens], fleet, prefix.key_salt)
            under_way[request] = prefix, clock.now() + fleet.limits.request_timeout_s
        for request, (prefix, deadline) in list(under_way.items()):
            answer = loader.prefetched(request)
            if answer is not None:
                del under_way[request]
                loaded.append(Loaded(prefix.label, keys=answer[1], in_l1=answer[0]))
                on_loaded(loaded[-1])
            elif clock.now() > deadline:
                raise EngineUnavailable(
                    f"prefetching {prefix.label!r} of fleet {fleet.name!r}",
                    seen=f"not loaded after {fleet.limits.request_timeout_s:g} s",
                    do="Look at the daemon's log, and at L2's latency; then run it again.",
                )
        if under_way:
            clock.sleep(POLL_S)
    return Prefetched(tuple(loaded), tuple(prefix.label for prefix in left_out))
