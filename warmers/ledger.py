"""What warmfront has warmed: one row a chunk, as numpy columns. The ledger, not a listing, says what is ours.

Segments are appended and merged; where they are kept does not belong here (`resources/state.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from warmers.plan import ChunkTree, WarmPlan


@dataclass(frozen=True, slots=True)
class Rows:
    """Ledger rows as columns of one length. Times are seconds since the epoch, 0 where it never happened."""

    digest: NDArray[np.str_]
    """Chunk hash, 64 hex digits."""
    salt: NDArray[np.str_]
    bytes: NDArray[np.int64]
    """Over all ranks."""
    template: NDArray[np.str_]
    """`template` or `template/context` that first needed the chunk."""
    source: NDArray[np.str_]
    """Digest of that template's content."""
    weights: NDArray[np.str_]
    warmed_at: NDArray[np.float64]
    refreshed_at: NDArray[np.float64]
    proven_at: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.digest)

    @classmethod
    def empty(cls) -> Self:
        """No row."""
        text, number = np.empty(0, "U1"), np.empty(0, np.float64)
        return cls(text, text, np.empty(0, np.int64), text, text, text, number, number, number)

    def take(self, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> Self:
        """Some of the rows."""
        return type(self)(*(getattr(self, f.name)[chosen] for f in fields(self)))

    def chunk_ids(self) -> list[tuple[str, str]]:
        """(salt, digest) of every row: what makes a chunk, within one namespace."""
        return list(zip(self.salt.tolist(), self.digest.tolist(), strict=True))


class Journal(Protocol):
    """The ledger of one namespace, as warming writes it."""

    def record(self, rows: Rows) -> None:
        """Append rows; a row replaces an earlier one of the same chunk."""

    def rows(self) -> Rows:
        """Every chunk's latest row."""


def merge(segments: Sequence[Rows]) -> Rows:
    """The latest row of every chunk; segments are given oldest first. A later 0 never erases a time."""
    if not segments:
        return Rows.empty()
    columns = [np.concatenate([getattr(s, f.name) for s in segments]) for f in fields(Rows)]
    joined = Rows(*columns)
    latest = {key: row for row, key in enumerate(joined.chunk_ids())}
    result = joined.take(np.array(list(latest.values()), np.int64))
    position = {key: at for at, key in enumerate(latest)}
    group = np.array([position[key] for key in joined.chunk_ids()], np.int64)
    for name in ("warmed_at", "refreshed_at", "proven_at"):
        np.maximum.at(getattr(result, name), group, getattr(joined, name))
    return result


def rows_of(plan: WarmPlan, chunks: Sequence[int], *, warmed_at: float = 0.0, proven_at: float = 0.0) -> Rows:
    """Ledger rows of some of a plan's chunks."""
    tree, size = plan.tree, plan.fleet.chunk_bytes * plan.fleet.engine.tensor_parallel
    owners = [plan.prefixes[tree.owner[chunk]] for chunk in chunks]
    times = np.ones(len(chunks))
    return Rows(
        digest=np.array([tree.hashes[chunk].tobytes().hex() for chunk in chunks], "U64"),
        salt=np.array([tree.salts[chunk] for chunk in chunks], np.str_),
        bytes=np.full(len(chunks), size, np.int64),
        template=np.array([owner.label for owner in owners], np.str_),
        source=np.array([owner.digest for owner in owners], np.str_),
        weights=np.full(len(chunks), plan.fleet.model.weights_digest),
        warmed_at=times * warmed_at,
        refreshed_at=times * warmed_at,
        proven_at=times * proven_at,
    )


def unknown_chunks(tree: ChunkTree, chunks: Sequence[int], known: Rows) -> list[int]:
    """Those of `chunks` that the ledger does not have: warmed by a run that was killed before it could write."""
    keys = set(known.chunk_ids())
    return [chunk for chunk in chunks if (tree.salts[chunk], tree.hashes[chunk].tobytes().hex()) not in keys]
