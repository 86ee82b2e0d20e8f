"""Which prefixes a fleet can afford: what is over its budget in L2 is neither warmed nor kept."""

from collections.abc import Sequence

from warmers.fleet import Fleet
from warmers.keys import chunk_hashes
from warmers.prefixes import Prefix


def afford(prefixes: Sequence[Prefix], fleet: Fleet) -> tuple[list[Prefix], list[Prefix]]:
    """Those within `fleet.budget_bytes`, and those left out: the heavier first, of equal ones the earlier.

    A chunk that several share is paid for once, so a prefix may come in on what others have brought.
    """
    if fleet.budget_bytes is None:
        return list(prefixes), []
    room = fleet.budget_bytes // (fleet.chunk_bytes * fleet.engine.tensor_parallel)
    paid: set[tuple[str, bytes]] = set()
    kept: set[int] = set()
    for number in sorted(range(len(prefixes)), key=lambda n: -prefixes[n].weight):
        prefix = prefixes[number]
        chunks = {(prefix.key_salt, row.tobytes()) for row in chunk_hashes(prefix.ids, fleet.engine.chunk_tokens)}
        if len(paid | chunks) <= room:
            paid |= chunks
            kept.add(number)
    return [p for n, p in enumerate(prefixes) if n in kept], [p for n, p in enumerate(prefixes) if n not in kept]
