"""What the ledger says that L2 holds, against what it does. What follows from it belongs in `warmers/life.py`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from warmers.budget import afford
from warmers.fleet import Fleet
from warmers.keys import KeyLayout
from warmers.ledger import ChunkId, Rows, rows_by_chunk
from warmers.plan import ChunkTree, grow_tree
from warmers.prefixes import Prefix
from warmers.presence import KVStore, StoreUsage

BATCH = 20_000
"""Chunks whose keys are made at once: their names are most of the memory that this takes."""
NEAR = 0.5
"""Share of `ttl_s` below which what is left of a chunk's life is near its end."""
POLICIES_THAT_CHOOSE_BADLY = ("allkeys-random", "volatile-random", "volatile-ttl")
"""They evict warmed chunks whatever their use; the others take what was used least, or refuse to write."""
FULL = 0.9


@dataclass(frozen=True, slots=True)
class Holding:
    """The ledger's rows as L2 has them, row by row."""

    rows: Rows
    whole: NDArray[np.bool_]
    """Every rank's key is there with its right size."""
    wrong: NDArray[np.bool_]
    """Some rank's has another size."""
    lives: NDArray[np.float64]
    """Seconds until the first of its keys is to be forgotten, inf where never; 0 where one is not there."""

    @property
    def missing(self) -> NDArray[np.bool_]:
        """Some rank's key is not there, and none has a wrong size."""
        return ~self.whole & ~self.wrong

    def near_end(self, fleet: Fleet) -> NDArray[np.bool_]:
        """Whole ones that live for less than half of what they were given."""
        near: NDArray[np.bool_] = self.whole & (self.lives < NEAR * (fleet.ttl_s or 0))
        return near


def keys_of(rows: Rows, fleet: Fleet) -> Iterator[str]:
    """L2 keys of ledger rows, each with all its ranks."""
    layout = KeyLayout.of(fleet)
    for salt, digest in rows.chunk_ids():
        for rank in range(layout.world_size):
            yield layout.name(digest.hex(), rank, salt)


def look_into(store: KVStore, rows: Rows, fleet: Fleet) -> Holding:
    """Ask L2 for every key of every row. Raises StoreUnavailable."""
    whole, wrong = np.zeros(len(rows), np.bool_), np.zeros(len(rows), np.bool_)
    lives, ranks = np.zeros(len(rows)), fleet.engine.tensor_parallel
    for start in range(0, len(rows), BATCH):
        part = slice(start, start + BATCH)
        names = list(keys_of(rows.take(part), fleet))
        sizes = store.sizes(names).reshape(-1, ranks)
        whole[part] = (sizes == fleet.chunk_bytes).all(axis=1)
        wrong[part] = ((sizes >= 0) & (sizes != fleet.chunk_bytes)).any(axis=1)
        if fleet.ttl_s is not None:
            lives[part] = np.maximum(store.lives(names).reshape(-1, ranks).min(axis=1), 0.0)
    if fleet.ttl_s is None:
        lives[whole] = np.inf
    return Holding(rows, whole, wrong, lives)


def needed_rows(rows: Rows, needed: frozenset[ChunkId]) -> NDArray[np.bool_]:
    """[row]: a plan needs the chunk."""
    return np.fromiter((chunk in needed for chunk in rows.chunk_ids()), np.bool_, len(rows))


@dataclass(frozen=True, slots=True)
class PrefixStock:
    """How much of one prefix L2 still has."""

    label: str
    warmed_tokens: int
    """Leading tokens that the ledger says were warmed."""
    held_tokens: int
    """Of those, what a request hits now."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """What somebody who looked has seen."""

    at: float
    """Seconds since the epoch."""
    chunks: int
    present: int
    missing: int
    wrong_size: int
    near_end: int
    needed: int
    """Chunks of the ledger that the current prefixes need."""
    held_bytes: int
    """Over all ranks, of chunks that are whole."""
    needed_bytes: int
    usage: StoreUsage
    evicted_since: int | None
    """Keys that the servers evicted since the last look, whosever they were; None where nobody had looked, or they
    were started anew."""
    prefixes: tuple[PrefixStock, ...] = field(default=())
    """Those that lost most first."""

    @property
    def hit_rate(self) -> float:
        """Share of the warmed tokens that requests hit now; 1 where nothing was warmed."""
        warmed = sum(prefix.warmed_tokens for prefix in self.prefixes)
        return sum(prefix.held_tokens for prefix in self.prefixes) / warmed if warmed else 1.0


def take_stock(
    held: Holding,
    prefixes: Sequence[Prefix],
    fleet: Fleet,
    usage: StoreUsage,
    last_evicted: int | None,
    now: float,
) -> Inventory:
    """Count. `prefixes`: the current ones; `last_evicted`: what the servers said then."""
    wanted, _ = afford(prefixes, fleet)
    tree = grow_tree(wanted, KeyLayout.of(fleet))
    at = rows_by_chunk(tree, held.rows)
    needed = np.zeros(len(held.rows), np.bool_)
    needed[at[at >= 0]] = True
    since = usage.evicted_keys - last_evicted if last_evicted is not None else -1
    return Inventory(
        at=now,
        chunks=len(held.rows),
        present=int(held.whole.sum()),
        missing=int(held.missing.sum()),
        wrong_size=int(held.wrong.sum()),
        near_end=int(held.near_end(fleet).sum()),
        needed=int(needed.sum()),
        held_bytes=int(held.rows.bytes[held.whole].sum()),
        needed_bytes=int(held.rows.bytes[needed].sum()),
        usage=usage,
        evicted_since=since if since >= 0 else None,
        prefixes=_stock(wanted, tree, at, held, fleet.engine.chunk_tokens),
    )


def _stock(
    prefixes: Sequence[Prefix], tree: ChunkTree, at: NDArray[np.int64], held: Holding, chunk_tokens: int
) -> tuple[PrefixStock, ...]:
    """`at` [chunk]: its row in the ledger, -1 where it was never warmed."""
    known = at >= 0
    there = np.zeros(len(at), np.bool_)
    there[known] = held.whole[at[known]]
    found = [
        PrefixStock(prefix.label, chunk_tokens * _leading(known[path]), chunk_tokens * _leading(there[path]))
        for prefix, path in zip(prefixes, tree.paths, strict=True)
    ]
    return tuple(sorted(found, key=lambda stock: stock.held_tokens - stock.warmed_tokens))


def _leading(so: NDArray[np.bool_]) -> int:
    """How many are true before the first that is not."""
    return int(np.argmin(so)) if len(so) and not so.all() else len(so)


def headroom_findings(usage: StoreUsage, adding_bytes: int, evicted_since: int | None) -> Sequence[str]:
    """What may take warmed chunks away, or keep new ones out."""
    found, policy = list(usage.findings), usage.eviction_policy
    if policy in POLICIES_THAT_CHOOSE_BADLY:
        found.append(f"maxmemory-policy {policy} evicts warmed chunks however much they are used: take volatile-lru.")
    if usage.capacity_bytes is not None and usage.used_bytes is not None:
        free = max(0, usage.capacity_bytes - usage.used_bytes)
        fate = "what is warmed then is refused" if policy in (None, "noeviction") else "others are evicted for it"
        if adding_bytes > free:
            found.append(f"{adding_bytes:,} bytes are to be warmed, and {free:,} are free: {fate}.")
        elif usage.used_bytes > FULL * usage.capacity_bytes:
            found.append(f"{usage.used_bytes:,} of {usage.capacity_bytes:,} bytes are in use: {fate} soon.")
    if evicted_since:
        found.append(f"{evicted_since:,} keys were evicted since the last look: give L2 more memory, or warm less.")
    return found
