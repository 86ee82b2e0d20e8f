"""The life of a chunk in L2: what is extended, what lapses, what is removed. Planned first, then carried out.

A live namespace is governed by its ledger, never by a listing; a superseded one belongs to one fleet and goes whole, by
listing. Looking into L2 belongs in `warmers/inventory.py`; stages of weights are `warmers/retention.py`.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from warmers.budget import afford
from warmers.fleet import Fleet
from warmers.inventory import NEAR, Holding, keys_of, needed_rows
from warmers.keys import KeyLayout
from warmers.lease import Fence
from warmers.ledger import ChunkId, Journal, Rows
from warmers.plan import grow_tree
from warmers.prefixes import Prefix
from warmers.presence import KVStore

BATCH = 2_000
"""Chunks between two looks at what is needed: what a template change in between can cost at most is a prefill."""
JITTER = 0.1
"""Share of its life by which a chunk's is shortened, so that those warmed together do not lapse together."""

Needed = Callable[[], frozenset[ChunkId]]
"""What the current prefixes are made of, read anew each time."""


def chunks_of(prefixes: Sequence[Prefix], fleet: Fleet) -> frozenset[ChunkId]:
    """What a fleet's prefixes are made of, as far as its budget goes."""
    tree = grow_tree(afford(prefixes, fleet)[0], KeyLayout.of(fleet))
    return frozenset(tree.chunk_id(chunk) for chunk in range(len(tree.hashes)))


@dataclass(frozen=True, slots=True)
class LifePlan:
    """What is to happen to the rows of a ledger. Indices of rows."""

    rows: Rows
    needed: NDArray[np.bool_]
    extend: NDArray[np.int64]
    seconds: NDArray[np.int64]
    """How long those in `extend` live from now on."""
    remove: NDArray[np.int64]
    forget: NDArray[np.int64]
    """Neither needed nor there any more: only the ledger still knows them."""

    @property
    def remove_bytes(self) -> int:
        """Over all ranks."""
        return int(self.rows.bytes[self.remove].sum())

    def removed_by_template(self) -> Sequence[tuple[str, int, int]]:
        """(template, chunks, bytes), most bytes first."""
        gone = self.rows.take(self.remove)
        chunks, size = Counter(gone.template.tolist()), Counter[str]()
        for template, count in zip(gone.template.tolist(), gone.bytes.tolist(), strict=True):
            size[template] += count
        return [(template, chunks[template], count) for template, count in size.most_common()]


@dataclass(frozen=True, slots=True)
class LifeResult:
    """What was done."""

    extended: int
    removed: int
    removed_bytes: int
    spared: int
    """Chunks that were to be removed, and were needed again by then."""


def plan_life(held: Holding, needed: frozenset[ChunkId], fleet: Fleet, grace_s: float, now: float) -> LifePlan:
    """Decide: extend what a plan needs before half of its life is over, remove what none has needed for `grace_s`."""
    rows = held.rows
    wanted = needed_rows(rows, needed)
    idle_s = now - np.maximum(rows.refreshed_at, rows.warmed_at)
    over = ~wanted & (idle_s > grace_s)
    extend = np.flatnonzero(wanted & held.near_end(fleet)) if fleet.ttl_s is not None else np.empty(0, np.int64)
    there = held.whole | held.wrong | (held.lives > 0)
    return LifePlan(
        rows=rows,
        needed=wanted,
        extend=extend,
        seconds=_lives(rows.digest[extend], fleet.ttl_s or 0),
        remove=np.flatnonzero(over & there),
        forget=np.flatnonzero(over & ~there),
    )


def _lives(digests: NDArray[np.uint8], ttl_s: int) -> NDArray[np.int64]:
    """A whole life less its jitter, by the chunk's own digest; more than half of it in any case."""
    share = np.ascontiguousarray(digests[:, :4]).view(">u4").reshape(-1) / 2**32
    return np.maximum((ttl_s * (1 - JITTER * share)).astype(np.int64), 1 + int(NEAR * ttl_s))


def carry_out_life(
    plan: LifePlan,
    fleet: Fleet,
    store: KVStore,
    journal: Journal,
    fence: Fence,
    needed_now: Needed,
    now: float,
    *,
    apply: bool,
) -> LifeResult:
    """Extend what is needed; with `apply` remove what is not. Call under the namespace's lease.

    What is needed is read anew before each batch: a template that changed meanwhile keeps its chunks. Killed at any
    time it leaves rows of chunks that are gone, which the next plan forgets. Raises StoreUnavailable, LeaseLost.
    """
    for start in range(0, len(plan.extend), BATCH):
        fence.check()
        chosen, seconds = plan.extend[start : start + BATCH], plan.seconds[start : start + BATCH]
        store.extend(list(keys_of(plan.rows.take(chosen), fleet)), np.repeat(seconds, fleet.engine.tensor_parallel))
    gone = [plan.forget]
    for start in range(0, len(plan.remove) if apply else 0, BATCH):
        fence.check()
        part = plan.remove[start : start + BATCH]
        chosen = part[~needed_rows(plan.rows.take(part), needed_now())]
        store.delete(list(keys_of(plan.rows.take(chosen), fleet)))
        gone.append(chosen)
    fence.check()
    _write(plan, np.concatenate(gone), journal, now)
    removed = np.concatenate(gone[1:]) if gone[1:] else np.empty(0, np.int64)
    return LifeResult(
        extended=len(plan.extend),
        removed=len(removed),
        removed_bytes=int(plan.rows.bytes[removed].sum()),
        spared=(len(plan.remove) - len(removed)) if apply else 0,
    )


def _write(plan: LifePlan, gone: NDArray[np.int64], journal: Journal, now: float) -> None:
    """Say in the ledger what was needed now, and drop what is gone."""
    refreshed = plan.rows.refreshed_at.copy()
    refreshed[plan.needed] = now
    stays = np.ones(len(plan.rows), np.bool_)
    stays[gone] = False
    journal.rewrite(replace(plan.rows, refreshed_at=refreshed).take(stays))


@dataclass(frozen=True, slots=True)
class NamespaceRecord:
    """A namespace that a fleet was warmed in."""

    name: str
    start: str
    """What all its keys in L2 begin with, and no others."""
    tier: str
    """Which L2 that is: its kind and where it is."""
    superseded_at: float | None = None
    """When somebody first saw that the fleet has another one; seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class NamespaceDecision:
    """What happens to one namespace, and why."""

    record: NamespaceRecord
    remove: bool
    why: str


def decide_namespaces(
    records: Sequence[NamespaceRecord], needed: Mapping[str, str], tier: str, grace_s: float, now: float
) -> list[NamespaceDecision]:
    """Which of a fleet's namespaces go: those that nobody needs (`needed`: by name, who) for `grace_s`.

    Each record comes back as it has to be remembered: with the time since when it is superseded, or without.
    """
    found = []
    for record in records:
        if record.name in needed:
            found.append(NamespaceDecision(replace(record, superseded_at=None), False, needed[record.name]))
            continue
        since = now if record.superseded_at is None else record.superseded_at
        marked, hours = replace(record, superseded_at=since), (now - since) / 3600
        if record.tier != tier:
            why = f"it is in {record.tier}, where this fleet has no L2 any more: remove it there by hand"
            found.append(NamespaceDecision(marked, False, why))
        else:
            found.append(NamespaceDecision(marked, now - since > grace_s, f"superseded {hours:.1f} hours ago"))
    return found


def remove_namespace(
    record: NamespaceRecord, store: KVStore, fence: Fence, is_needed: Callable[[], bool]
) -> int | None:
    """Delete every key of a superseded namespace; how many there were, None where somebody needs it again.

    Call under the lease of that namespace, which a roll-back to it would hold too.
    """
    removed = 0
    for names in store.names(record.start):
        fence.check()
        if is_needed():
            return None
        store.delete(names)
        removed += len(names)
    return removed


def remove_lapsed(layout: KeyLayout, needed: Needed, store: KVStore, fence: Fence, *, apply: bool) -> int:
    """On a tier that forgets nothing by itself, delete what nobody has used for its life, users' own chunks too.

    By listing, so it never takes what a plan needs, however old that is. How many there were.
    """
    found, ranks = 0, range(layout.world_size)
    for names in store.names(layout.start):
        fence.check()
        wanted = {layout.name(digest.hex(), rank, salt) for salt, digest in needed() for rank in ranks}
        left = store.lives(names).tolist()
        over = [name for name, life in zip(names, left, strict=True) if life == 0 and name not in wanted]
        if apply:
            store.delete(over)
        found += len(over)
    return found
