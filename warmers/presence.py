"""What L2 holds of the chunks that should be there. Presence is not proof: see `warmers/proof.py`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """How full an L2 tier is, whosever the bytes are."""

    used_bytes: int | None = None
    """None: it does not say."""
    capacity_bytes: int | None = None
    """None: it does not say, or has no bound."""
    eviction_policy: str | None = None
    """Valkey's maxmemory-policy; None for a tier that evicts nothing by itself."""
    evicted_keys: int = 0
    """Since its servers started."""
    findings: tuple[str, ...] = ()
    """What else is set there otherwise than chunks need it, and what to do."""


class KVStore(Protocol):
    """An L2 tier, as far as its keys go: never their values. Every method raises StoreUnavailable or ConfigError."""

    def sizes(self, keys: Sequence[str]) -> NDArray[np.int64]:
        """Bytes under each key, -1 where there is none; pipelined."""

    def lives(self, keys: Sequence[str]) -> NDArray[np.float64]:
        """Seconds until each key is to be forgotten; 0: overdue, inf: never, -1: there is none."""

    def extend(self, keys: Sequence[str], seconds: NDArray[np.int64]) -> None:
        """Have each key that is there live so long from now on; a tier of one age for all knows only that."""

    def delete(self, keys: Sequence[str]) -> None:
        """Delete keys, those that are there."""

    def names(self, start: str) -> Iterator[list[str]]:
        """Every key that begins with `start`, in batches: a whole namespace. Slow; never for what is live."""

    def usage(self) -> StoreUsage:
        """How full it is."""

    def require_writable(self, start: str) -> None:
        """Write and delete something small under `start`. Raises ConfigError where LMCache could never store there."""


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
