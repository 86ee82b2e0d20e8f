"""Leases in the state store: conditional writes, and a heartbeat in a thread of its own."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from uuid import uuid4

from resources.objects import Objects
from warmers.errors import LeaseHeld, LeaseLost, StateUnavailable
from warmers.lease import Fence, LeaseRecord, claim, release, renew
from warmers.replica import Clock

POLLS = 30
"""How often a lease is looked at in the time that it runs."""


@dataclass(frozen=True, slots=True)
class StateLease:
    """Satisfies warmers.lease.Lease."""

    objects: Objects
    clock: Clock

    @contextmanager
    def hold(
        self, namespace: str, ttl_s: float, patience_s: float = 0.0, on_event: Callable[[str], None] = print
    ) -> Iterator[Fence]:
        """Hold the namespace; renewed every third of `ttl_s`. Raises LeaseHeld, at once or after `patience_s`."""
        held = _Held(self.objects, self.clock, namespace, ttl_s)
        held.acquire_within(patience_s, on_event)
        beat = threading.Thread(target=held.keep, name=f"lease-{namespace}", daemon=True)
        beat.start()
        try:
            yield held
        finally:
            held.ended.set()
            beat.join()
            held.release()


@dataclass(slots=True)
class _Held:
    objects: Objects
    clock: Clock
    namespace: str
    ttl_s: float
    record: LeaseRecord = field(init=False)
    ended: threading.Event = field(default_factory=threading.Event)
    lost: threading.Event = field(default_factory=threading.Event)

    @property
    def path(self) -> str:
        return f"namespaces/{self.namespace}/lease.json"

    @property
    def number(self) -> int:
        """The fencing number."""
        return self.record.fence

    def check(self) -> None:
        """Raise LeaseLost when the lease has expired or become another's."""
        if self.lost.is_set() or self.clock.now() >= self.record.expires_at:
            raise LeaseLost(
                f"writing to namespace {self.namespace}",
                seen=f"lease number {self.number} of {self.record.holder} is no longer ours",
                do="Another run may have taken over; what was recorded stays. Run again.",
            )

    def acquire(self) -> None:
        """Take the lease. One that is held is watched for its time: a living holder renews it, a dead one's is taken.

        That holds where a dead holder's clock was ahead, too.
        """
        holder = f"{socket.gethostname()}:{os.getpid()}:{uuid4().hex[:8]}"
        first, version = self._read()
        current, began = first, time.monotonic()
        while (mine := claim(current, holder, self.clock.now(), self.ttl_s)) is None and current == first:
            if current is not None and time.monotonic() - began > self.ttl_s:
                mine = claim(replace(current, expires_at=0.0), holder, self.clock.now(), self.ttl_s)
                break
            time.sleep(self.ttl_s / POLLS)
            current, version = self._read()
        if mine is not None and self._write(mine, version):
            self.record = mine
            return
        current, _ = self._read()
        if mine is None or current != mine:  # equal: our write arrived, and only its answer was lost
            seen = "another run was faster"
            if current is not None:
                seen = f"{current.holder} holds it for {max(0.0, current.expires_at - self.clock.now()):.0f} s more"
            raise LeaseHeld(
                f"taking the lease of namespace {self.namespace}",
                seen=seen,
                do="Wait for that run; a dead holder's lease expires by itself.",
            )
        self.record = mine

    def acquire_within(self, patience_s: float, on_event: Callable[[str], None]) -> None:
        """Take the lease, once living holders have given it up."""
        began = time.monotonic()
        while True:
            try:
                self.acquire()
            except LeaseHeld as held:
                if time.monotonic() - began >= patience_s:
                    raise
                on_event(f"waiting: {held.seen}")
            else:
                return

    def keep(self) -> None:
        """Renew until the block ends. A missed beat is tried again; `check` watches the expiry meanwhile."""
        while not self.ended.wait(self.ttl_s / 3):
            with suppress(StateUnavailable):
                current, version = self._read()
                renewed = renew(current, self.record, self.clock.now(), self.ttl_s)
                if renewed is None:
                    self.lost.set()
                    return
                # A refused write may be our own, whose answer was lost; if not, the next beat sees whose.
                if self._write(renewed, version) or self._read()[0] == renewed:
                    self.record = renewed

    def release(self) -> None:
        with suppress(StateUnavailable):
            current, version = self._read()
            free = release(current, self.record)
            if free is not None:
                self._write(free, version)

    def _read(self) -> tuple[LeaseRecord | None, str | None]:
        found = self.objects.read(self.path)
        return (LeaseRecord(**json.loads(found[0])), found[1]) if found else (None, None)

    def _write(self, record: LeaseRecord, version: str | None) -> bool:
        return self.objects.replace(self.path, json.dumps(asdict(record)).encode(), version)
