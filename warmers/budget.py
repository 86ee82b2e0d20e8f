"""Which prefixes there is room for: what a fleet's budget in L2, or a replica's L1, leaves out."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from warmers.fleet import Fleet
from warmers.keys import TokenIds, chunk_hashes
from warmers.prefixes import Prefix


class Weighed(Protocol):
    """A prefix, as far as room for it goes."""

    @property
    def ids(self) -> TokenIds:
        """Its tokens."""

    @property
    def key_salt(self) -> str:
        """The salt in its keys."""

    @property
    def weight(self) -> float:
        """Heavier ones come first."""


P = TypeVar("P", bound=Weighed)


def afford(prefixes: Sequence[Prefix], fleet: Fleet) -> tuple[list[Prefix], list[Prefix]]:
    """Those within `fleet.budget_bytes`, and those left out, which are neither warmed nor kept."""
    if fleet.budget_bytes is None:
        return list(prefixes), []
    room = fleet.budget_bytes // (fleet.chunk_bytes * fleet.engine.tensor_parallel)
    return within(prefixes, room, fleet.engine.chunk_tokens)


def within(prefixes: Sequence[P], room_chunks: int, chunk_tokens: int) -> tuple[list[P], list[P]]:
    """Those that there is room for, and those left out: the heavier first, of equal ones the earlier.

    A chunk that several share is paid for once, so a prefix may come in on what others have brought.
    """
    paid: set[tuple[str, bytes]] = set()
    kept: set[int] = set()
    for number in sorted(range(len(prefixes)), key=lambda n: -prefixes[n].weight):
        prefix = prefixes[number]
        chunks = {(prefix.key_salt, row.tobytes()) for row in chunk_hashes(prefix.ids, chunk_tokens)}
        if len(paid | chunks) <= room_chunks:
            paid |= chunks
            kept.add(number)
    return [p for n, p in enumerate(prefixes) if n in kept], [p for n, p in enumerate(prefixes) if n not in kept]
