"""One writer per namespace: a lease with an expiry, a heartbeat and a fencing number.

The decisions are here, as pure functions on the lease document; reading, conditional writing and the
heartbeat are `resources/leases.py`.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """The lease document: who writes, until when, and how many writers there were."""

    holder: str
    fence: int
    """Grows by one with every holder, so that a late writer is told from the current one."""
    expires_at: float
    """Seconds since the epoch; 0: released."""


class Fence(Protocol):
    """Proof of holding a lease."""

    @property
    def number(self) -> int:
        """The fencing number."""

    def check(self) -> None:
        """Raise LeaseLost unless the lease is still ours."""


class Lease(Protocol):
    """Leases on namespaces."""

    def hold(self, namespace: str, ttl_s: float) -> AbstractContextManager[Fence]:
        """Hold `namespace`; renewed until the block ends. Raises LeaseHeld."""


def claim(current: LeaseRecord | None, holder: str, now: float, ttl_s: float) -> LeaseRecord | None:
    """The record to write, or None while another holder's lease runs."""
    if current is not None and current.expires_at > now:
        return None
    return LeaseRecord(holder, (current.fence if current else 0) + 1, now + ttl_s)


def renew(current: LeaseRecord | None, mine: LeaseRecord, now: float, ttl_s: float) -> LeaseRecord | None:
    """The record to write, or None when the lease has become another's."""
    if current is None or (current.holder, current.fence) != (mine.holder, mine.fence):
        return None
    return replace(mine, expires_at=now + ttl_s)


def release(current: LeaseRecord | None, mine: LeaseRecord) -> LeaseRecord | None:
    """The record to write, or None when there is nothing of ours to release. The fencing number stays."""
    if current is None or (current.holder, current.fence) != (mine.holder, mine.fence):
        return None
    return replace(mine, expires_at=0.0)
