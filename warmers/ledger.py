"""What warmfront has warmed: one row a chunk, as numpy columns. The ledger, not a listing, says what is ours.

Segments are appended and merged; where they are kept does not belong here (`resources/state.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from warmers.keys import Hashes
from warmers.plan import ChunkTree, WarmPlan

ChunkId = tuple[str, bytes]
"""Salt and digest: what makes a chunk, within one namespace."""
Text = NDArray[np.object_]
"""Strings, each kept once however many rows have it: a ledger may have a million."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Ledger rows as columns of one length. Times are seconds since the epoch, 0 where it never happened."""

    digest: Hashes
    """[row, 32]."""
    salt: Text
    bytes: NDArray[np.int64]
    """Over all ranks."""
    template: Text
    """`template` or `template/context` that first needed the chunk."""
    source: Text
    """Digest of that template's content."""
    weights: Text
    warmed_at: NDArray[np.float64]
    refreshed_at: NDArray[np.float64]
    """When a plan needed it last, as far as anybody looked."""
    proven_at: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.digest)

    @classmethod
    def empty(cls) -> Self:
        """No row."""
        text, number = np.empty(0, np.object_), np.empty(0, np.float64)
        return cls(np.empty((0, 32), np.uint8), text, np.empty(0, np.int64), text, text, text, number, number, number)

    def take(self, chosen: NDArray[np.bool_] | NDArray[np.int64] | slice) -> Self:
        """Some of the rows."""
        return type(self)(*(getattr(self, f.name)[chosen] for f in fields(self)))

    def chunk_ids(self) -> list[ChunkId]:
        """Of every row."""
        return [(salt, row.tobytes()) for salt, row in zip(self.salt.tolist(), self.digest, strict=True)]


class Journal(Protocol):
    """The ledger of one namespace, as warming and retention write it."""

    def record(self, rows: Rows) -> None:
        """Append rows; a row replaces an earlier one of the same chunk."""

    def rows(self) -> Rows:
        """Every chunk's latest row."""

    def rewrite(self, rows: Rows) -> None:
        """Keep these alone. Killed before its end, it leaves others too, and no row of these is lost."""


def merge(segments: Sequence[Rows]) -> Rows:
    """The latest row of every chunk; segments are given oldest first. A later 0 never erases a time."""
    if not segments:
        return Rows.empty()
    joined = Rows(*(np.concatenate([getattr(s, f.name) for s in segments]) for f in fields(Rows)))
    identities = _identities(joined.salt.tolist(), joined.digest, {})
    _, from_the_end, group = np.unique(identities[::-1], return_index=True, return_inverse=True)
    result = joined.take(len(joined) - 1 - from_the_end)
    for name in ("warmed_at", "refreshed_at", "proven_at"):
        np.maximum.at(getattr(result, name), group[::-1], getattr(joined, name))
    return result


def rows_by_chunk(tree: ChunkTree, rows: Rows) -> NDArray[np.int64]:
    """[chunk]: the row that has it, -1 where none does. Ids as tuples would take a gigabyte for a million of each."""
    if not len(rows):
        return np.full(len(tree.hashes), -1, np.int64)
    codes: dict[str, int] = {}
    known = _identities(rows.salt.tolist(), rows.digest, codes)
    wanted = _identities(tree.salts, tree.hashes, codes)
    order = np.argsort(known)
    nearest = order[np.minimum(np.searchsorted(known, wanted, sorter=order), len(rows) - 1)]
    return np.where(known[nearest] == wanted, nearest, -1)


def _identities(salts: Sequence[str], digests: Hashes, codes: dict[str, int]) -> NDArray[np.bytes_]:
    """A fixed string of bytes for each chunk, equal where the chunk is; `codes` of salts are shared between calls."""
    numbers = np.array([codes.setdefault(salt, len(codes)) for salt in salts], ">u4")
    whole = np.concatenate([numbers.view(np.uint8).reshape(-1, 4), digests], axis=1)
    return np.ascontiguousarray(whole).view("S36").reshape(-1)


def rows_of(plan: WarmPlan, chunks: Sequence[int], *, warmed_at: float = 0.0, proven_at: float = 0.0) -> Rows:
    """Ledger rows of some of a plan's chunks."""
    tree, size = plan.tree, plan.fleet.chunk_bytes * plan.fleet.engine.tensor_parallel
    owners = [plan.prefixes[tree.owner[chunk]] for chunk in chunks]
    times = np.ones(len(chunks))
    return Rows(
        digest=tree.hashes[np.asarray(chunks, np.int64)],
        salt=np.array([tree.salts[chunk] for chunk in chunks], np.object_),
        bytes=np.full(len(chunks), size, np.int64),
        template=np.array([owner.label for owner in owners], np.object_),
        source=np.array([owner.digest for owner in owners], np.object_),
        weights=np.full(len(chunks), plan.fleet.model.weights_digest, np.object_),
        warmed_at=times * warmed_at,
        refreshed_at=times * warmed_at,
        proven_at=times * proven_at,
    )


def unknown_chunks(tree: ChunkTree, chunks: Sequence[int], known: Rows) -> list[int]:
    """Those of `chunks` that the ledger does not have: warmed by a run that was killed before it could write."""
    at = rows_by_chunk(tree, known)
    return [chunk for chunk in chunks if at[chunk] < 0]
