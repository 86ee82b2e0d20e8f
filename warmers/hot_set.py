"""The hot set: the prefixes that a replica has at hand before it takes traffic, as gates and prefetches read it.

It says all that loading them takes, so that whoever loads needs no settings. Keeping it is `resources/hot_sets.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from warmers.budget import within
from warmers.changes import CANDIDATE
from warmers.fleet import Fleet
from warmers.keys import KeyLayout, TokenIds
from warmers.ledger import Rows, rows_by_chunk
from warmers.plan import grow_tree
from warmers.prefixes import Prefix
from warmers.salts import combined


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """One prefix, as a request asks for it."""

    label: str
    ids: TokenIds
    """Its full chunks, no more."""
    salt: str = ""
    """The cache_salt that its requests carry."""
    adapter: str | None = None
    adapter_salt: str = ""
    weight: float = 1.0

    @property
    def key_salt(self) -> str:
        """The salt in its keys."""
        return combined(self.adapter_salt, self.salt)


@dataclass(frozen=True, slots=True)
class HotSet:
    """What one namespace's replicas load, the heaviest first."""

    fleet: str
    namespace: str
    served_name: str
    model_path: str
    """The string in every key."""
    world_size: int
    chunk_tokens: int
    chunk_bytes: int
    """Of one chunk, over all ranks."""
    prefixes: tuple[HotPrefix, ...]

    @classmethod
    def of(cls, fleet: Fleet, prefixes: Sequence[Prefix]) -> "HotSet":
        """Of those that fill a chunk."""
        hot = [
            HotPrefix(p.label, p.ids[: p.full_tokens], p.salt, p.adapter, p.adapter_salt, p.weight)
            for p in prefixes
            if p.chunks
        ]
        return cls(
            fleet=fleet.name,
            namespace=fleet.namespace,
            served_name=fleet.model.served_name,
            model_path=fleet.model.path,
            world_size=fleet.engine.tensor_parallel,
            chunk_tokens=fleet.engine.chunk_tokens,
            chunk_bytes=fleet.chunk_bytes * fleet.engine.tensor_parallel,
            prefixes=tuple(sorted(hot, key=lambda prefix: -prefix.weight)),
        )

    @property
    def bytes(self) -> int:
        """What it takes in L1, where no two of them begin alike."""
        return sum(len(prefix.ids) for prefix in self.prefixes) // self.chunk_tokens * self.chunk_bytes

    def within(self, room_bytes: int) -> tuple["HotSet", tuple[str, ...]]:
        """As much of it as there is room for, the heaviest first; labels of what is left out."""
        kept, left = within(self.prefixes, room_bytes // self.chunk_bytes, self.chunk_tokens)
        return replace(self, prefixes=tuple(kept)), tuple(prefix.label for prefix in left)


def servable(prefixes: Sequence[Prefix], fleet: Fleet, ledger: Rows) -> list[Prefix]:
    """Those that serving replicas should have at hand: every chunk proven since it was warmed, no candidates."""
    tree = grow_tree(prefixes, KeyLayout.of(fleet))
    at = rows_by_chunk(tree, ledger)
    proven = np.zeros(len(at), np.bool_)
    known = at[at >= 0]
    proven[at >= 0] = (ledger.proven_at[known] > 0) & (ledger.proven_at[known] >= ledger.warmed_at[known])
    whole = (prefix for prefix, path in zip(prefixes, tree.paths, strict=True) if proven[path].all())
    return [prefix for prefix in whole if prefix.chunks and not prefix.template.endswith(CANDIDATE)]
