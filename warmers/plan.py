"""What to prefill, in which order, so that every chunk of every prefix is in L2 and nothing is computed twice.

Chunks of all prefixes form a tree: a chunk's hash covers everything before it, so prefixes that start
alike share their first chunks. A step is one request that computes one run of missing chunks; it waits
for the step that computes what stands before it. Carrying a plan out belongs in `warmers/warm.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from warmers.budget import afford
from warmers.fleet import Fleet
from warmers.keys import Hashes, KeyLayout, chunk_hashes
from warmers.prefixes import Prefix
from warmers.presence import Presence


@dataclass(frozen=True)
class ChunkTree:
    """Every distinct chunk of a set of prefixes, parents before children.

    `hashes` [chunk, 32]; `salts` and `owner` (the first prefix that has it) run along;
    `paths[p]` are the chunks of prefix p from its start.
    """

    layout: KeyLayout
    hashes: Hashes
    salts: tuple[str, ...]
    owner: NDArray[np.int32]
    paths: tuple[NDArray[np.int32], ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """L2 keys, chunk by chunk, each with all its ranks."""
        return tuple(self.names_of(range(len(self.hashes))))

    def chunk_id(self, chunk: int) -> tuple[str, bytes]:
        """Salt and digest."""
        return self.salts[chunk], self.hashes[chunk].tobytes()

    def names_of(self, chunks: Sequence[int] | range) -> Iterator[str]:
        """L2 keys of some chunks, each with all its ranks."""
        for chunk in chunks:
            digest = self.hashes[chunk].tobytes().hex()
            for rank in range(self.layout.world_size):
                yield self.layout.name(digest, rank, self.salts[chunk])


def grow_tree(prefixes: Sequence[Prefix], layout: KeyLayout) -> ChunkTree:
    """The distinct chunks of `prefixes`; equal token ids under two salts are two chunks."""
    index: dict[tuple[str, bytes], int] = {}
    owner: list[int] = []
    paths = []
    for number, prefix in enumerate(prefixes):
        path: list[int] = []
        for row in chunk_hashes(prefix.ids, layout.chunk_tokens):
            key = (prefix.key_salt, row.tobytes())
            chunk = index.setdefault(key, len(index))
            if chunk == len(owner):
                owner.append(number)
            path.append(chunk)
        paths.append(np.array(path, np.int32))
    hashes = np.frombuffer(b"".join(digest for _, digest in index), np.uint8).reshape(-1, 32)
    salts = tuple(salt for salt, _ in index)
    return ChunkTree(layout, hashes, salts, np.array(owner, np.int32), tuple(paths))


@dataclass(frozen=True, slots=True)
class Step:
    """One request: the first `end` chunks of a prefix, of which it computes those from `start`."""

    prefix: int
    start: int
    end: int
    after: int | None
    """The step that has to be done first; None: everything before `start` is in L2."""

    @property
    def chunks(self) -> int:
        """Chunks that this step computes."""
        return self.end - self.start


@dataclass(frozen=True)
class WarmPlan:
    """What should be in L2, what is there, and the steps that close the gap."""

    fleet: Fleet
    prefixes: tuple[Prefix, ...]
    tree: ChunkTree
    presence: Presence
    steps: tuple[Step, ...]
    deferred_chunks: int = 0
    """Missing chunks left for the next run by the cap."""
    over_budget: tuple[str, ...] = ()
    """Labels of prefixes that the fleet's budget in L2 leaves out."""

    @property
    def missing_chunks(self) -> int:
        """Distinct chunks that are not whole in L2."""
        return int((~self.presence.complete).sum())

    @property
    def compute_tokens(self) -> int:
        """Tokens that the engine computes when the plan is carried out; 0 when nothing changed."""
        return sum(step.chunks for step in self.steps) * self.fleet.engine.chunk_tokens

    @property
    def store_bytes(self) -> int:
        """Bytes that the plan adds to L2, over all ranks."""
        chunks = sum(step.chunks for step in self.steps)
        return chunks * self.fleet.chunk_bytes * self.fleet.engine.tensor_parallel

    @property
    def engine_seconds(self) -> float | None:
        """Estimated prefill time on one engine, from the rate of the last run; None before the first."""
        rate = self.fleet.prefill_tokens_per_s
        return self.compute_tokens / rate if rate else None

    def missing_of(self, prefix: int) -> int:
        """Missing chunks of one prefix, shared ones included."""
        return int((~self.presence.complete[self.tree.paths[prefix]]).sum())

    def twin_of(self, prefix: int) -> int | None:
        """An earlier prefix with the very same chunks: the two are one piece of work."""
        path = self.tree.paths[prefix]
        owner = int(self.tree.owner[path[-1]])
        return owner if owner != prefix and len(self.tree.paths[owner]) == len(path) else None

    def rows(self) -> list["PlanRow"]:
        """One row a prefix, in the order of the prefixes."""
        size = self.fleet.chunk_bytes * self.fleet.engine.tensor_parallel
        rows = []
        for number, prefix in enumerate(self.prefixes):
            twin, missing = self.twin_of(number), self.missing_of(number)
            rows.append(
                PlanRow(
                    label=prefix.label,
                    tokens=prefix.shared,
                    chunks=prefix.chunks,
                    present=prefix.chunks - missing,
                    missing=missing,
                    tail_tokens=prefix.tail_tokens,
                    bytes=prefix.chunks * size,
                    same_as=None if twin is None else self.prefixes[twin].label,
                )
            )
        return rows


@dataclass(frozen=True, slots=True)
class PlanRow:
    """What the plan says of one prefix. Chunks that prefixes share count for each of them."""

    label: str
    tokens: int
    chunks: int
    present: int
    missing: int
    tail_tokens: int
    """Computed by every request, since they do not fill a chunk."""
    bytes: int
    """In L2, over all ranks."""
    same_as: str | None


def plan_warm(prefixes: Sequence[Prefix], fleet: Fleet, look_up: Callable[[ChunkTree], Presence]) -> WarmPlan:
    """Compare what `prefixes` need with what L2 holds, and order what is missing."""
    affordable, left_out = afford(prefixes, fleet)
    ordered = tuple(affordable)
    tree = grow_tree(ordered, KeyLayout.of(fleet))
    presence = look_up(tree)
    steps = _order_steps(ordered, tree, presence.complete)
    plan = WarmPlan(fleet, ordered, tree, presence, steps, over_budget=tuple(prefix.label for prefix in left_out))
    cap = fleet.limits.max_tokens_per_run
    return plan if cap is None else _cap(plan, max(1, cap // fleet.engine.chunk_tokens))


def _order_steps(prefixes: tuple[Prefix, ...], tree: ChunkTree, complete: NDArray[np.bool_]) -> tuple[Step, ...]:
    """One step for each run of missing chunks, heaviest subtree first, siblings together, parents first."""
    heaviest: dict[int, float] = {}
    for prefix, path in zip(prefixes, tree.paths, strict=True):
        if len(path):
            heaviest[int(path[0])] = max(prefix.weight, heaviest.get(int(path[0]), 0.0))
    order = sorted(
        (number for number, path in enumerate(tree.paths) if len(path)),
        key=lambda number: (-heaviest[int(tree.paths[number][0])], tree.paths[number].tolist()),
    )
    computed_by: dict[int, int] = {}
    steps: list[Step] = []
    for number in order:
        path = tree.paths[number]
        missing = [i for i, chunk in enumerate(path.tolist()) if not complete[chunk] and chunk not in computed_by]
        for start, end in _runs(missing):
            before = [computed_by[chunk] for chunk in path[:start].tolist() if chunk in computed_by]
            steps.append(Step(number, start, end, max(before, default=None)))
            computed_by.update(dict.fromkeys(path[start:end].tolist(), len(steps) - 1))
    return tuple(steps)


def with_repairs(plan: WarmPlan, lost: Sequence[int]) -> WarmPlan:
    """The plan, and behind its steps those that compute the chunks `lost` once more; everything else is in L2."""
    complete = np.ones(len(plan.tree.hashes), np.bool_)
    complete[list(lost)] = False
    first = len(plan.steps)
    repairs = _order_steps(plan.prefixes, plan.tree, complete)
    shifted = (replace(step, after=None if step.after is None else first + step.after) for step in repairs)
    return replace(plan, steps=(*plan.steps, *shifted))


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Maximal runs of consecutive numbers, as half-open pairs."""
    for i, number in enumerate(numbers):
        if i == 0 or numbers[i - 1] != number - 1:
            start = number
        if i == len(numbers) - 1 or numbers[i + 1] != number + 1:
            yield start, number + 1


def _cap(plan: WarmPlan, chunks: int) -> WarmPlan:
    """Keep the first steps that fit into `chunks`, the last of them cut short at a chunk."""
    kept: list[Step] = []
    room = chunks
    for step in plan.steps:
        if room <= 0:
            break
        kept.append(step if step.chunks <= room else replace(step, end=step.start + room))
        room -= kept[-1].chunks
    left = sum(step.chunks for step in plan.steps) - (chunks - room)
    return replace(plan, steps=tuple(kept), deferred_chunks=left)
