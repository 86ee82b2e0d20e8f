"""What L2 holds of the chunks that should be there. Presence is not proof: see `warmers/proof.py`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class KVStore(Protocol):
    """An L2 tier, as far as its keys and sizes go."""

    def sizes(self, keys: Sequence[str]) -> NDArray[np.int64]:
        """Bytes under each key, -1 where there is none; pipelined. Raises StoreUnavailable."""

    def delete(self, keys: Sequence[str]) -> int:
        """Delete keys, return how many existed. Raises StoreUnavailable."""


@dataclass(frozen=True)
class Presence:
    """Sizes found in L2: `sizes` [chunk, rank] in bytes, -1 absent."""

    sizes: NDArray[np.int64]
    expected_bytes: int

    @cached_property
    def complete(self) -> NDArray[np.bool_]:
        """[chunk]: every rank's key exists with the right size."""
        whole: NDArray[np.bool_] = (self.sizes == self.expected_bytes).all(axis=1)
        return whole

    @property
    def wrong(self) -> NDArray[np.bool_]:
        """[chunk, rank]: there, with another size: truncated, oversized, or of another layout."""
        wrong: NDArray[np.bool_] = (self.sizes >= 0) & (self.sizes != self.expected_bytes)
        return wrong


def look(store: KVStore, names: Sequence[str], ranks: int, expected_bytes: int) -> Presence:
    """Ask `store` for every key; `names` run chunk by chunk, each with all its ranks."""
    return Presence(store.sizes(names).reshape(-1, ranks), expected_bytes)
