"""Capacity windows: when reserved capacity is there, and until when a roll-out into it may still begin.

A Capacity Block ends before its EndDate: EC2 terminates its instances from 30 minutes before (60 for UltraServers), and
Karpenter drains from 40 minutes before, whatever a pod says. What EC2 answers is read in `resources/ec2_capacity.py`.
Times are seconds since the epoch.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from decimal import Decimal
from typing import Literal

DRAIN_S = 40 * 60.0
ULTRASERVER_DRAIN_S = 70 * 60.0
"""EC2 ends them 60 minutes before; the ten minutes that Karpenter's drain has are added."""
AHEAD_DAYS = 14
"""For which off-peak hours are looked up."""
ACTIVE, SCHEDULED = "active", "scheduled"
PENDING = ("payment-pending", "pending", "assessing", "delayed")
"""They may become capacity, and may not."""

Kind = Literal["capacity-block", "default"]


@dataclass(frozen=True, slots=True)
class Reservation:
    """One capacity reservation, as EC2 says."""

    id: str
    kind: Kind
    state: str
    instance_type: str
    zone: str
    instances: int
    available: int
    start: float
    end: float | None
    """None: it has none. It moves with an extension, so it is read again each time."""
    ultraserver: bool = False
    extension: str = ""
    """State of an extension that is not in `end` yet; empty: there is none."""


@dataclass(frozen=True, slots=True)
class Lead:
    """What a roll-out takes until its first pod may serve, in seconds."""

    provision_s: float
    load_s: float
    warm_s: float
    margin_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.provision_s + self.load_s + self.warm_s + self.margin_s


@dataclass(frozen=True, slots=True)
class Window:
    """When a reservation's capacity may be used."""

    reservation: Reservation
    opens_at: float
    closes_at: float | None
    """When its drain begins; None: it goes on."""
    why_not: str = ""
    """Why it cannot be used; empty where it can."""

    @property
    def usable(self) -> bool:
        """Whether it is there, or paid for, and not over."""
        return not self.why_not

    def admits_until(self, lead: Lead) -> float | None:
        """The last moment at which a roll-out may begin in it; None: there is none."""
        return None if self.closes_at is None else self.closes_at - lead.total_s


def window_of(reservation: Reservation, now: float) -> Window:
    """What a reservation's state and dates mean."""
    drain = ULTRASERVER_DRAIN_S if reservation.ultraserver else DRAIN_S
    block = reservation.kind == "capacity-block"
    closes = reservation.end if reservation.end is None or not block else reservation.end - drain
    why = ""
    if reservation.state in PENDING:
        why = f"it is {reservation.state}, and may never come"
    elif reservation.state not in (ACTIVE, SCHEDULED):
        why = f"it is {reservation.state}"
    elif closes is not None and closes <= now:
        why = "its drain has begun"
    return Window(reservation, max(reservation.start, now), closes, why)


@dataclass(frozen=True, slots=True)
class OffPeak:
    """Hours of some days of the week in which roll-outs may begin. `until` before `since` is on the next day."""

    days: frozenset[int]
    """0 is Monday."""
    since: tuple[int, int]
    """Hour and minute."""
    until: tuple[int, int]
    zone: tzinfo

    def intervals(self, now: float) -> Iterator[tuple[float, float]]:
        """From the one that `now` may be in, for AHEAD_DAYS. Local times, so a change of clocks moves them along."""
        today = datetime.fromtimestamp(now, self.zone).date()
        for number in range(-1, AHEAD_DAYS):
            day = today + timedelta(days=number)
            if day.weekday() in self.days:
                last = day if self.since < self.until else day + timedelta(days=1)
                start = datetime(day.year, day.month, day.day, *self.since, tzinfo=self.zone).timestamp()
                end = datetime(last.year, last.month, last.day, *self.until, tzinfo=self.zone).timestamp()
                if end > now:
                    yield start, end


@dataclass(frozen=True, slots=True)
class Admission:
    """When a roll-out may begin."""

    at: float
    window: Window


def admission(windows: Iterable[Window], lead: Lead, off_peak: Sequence[OffPeak], now: float) -> Admission | None:
    """The earliest moment from now on; None where there is none in sight. Without off-peak hours, any hour will do."""
    hours: list[tuple[float, float]] = [i for each in off_peak for i in each.intervals(now)]
    if not off_peak:
        hours = [(now, float("inf"))]
    found = [
        Admission(start, window)
        for window in windows
        if window.usable
        for since, until in hours
        if (start := max(window.opens_at, since, now)) < until
        and ((last := window.admits_until(lead)) is None or start <= last)
    ]
    return min(found, key=lambda one: one.at, default=None)


@dataclass(frozen=True, slots=True)
class Offering:
    """A Capacity Block that EC2 offers. Whether to buy it is for people to decide: warmfront buys nothing."""

    id: str
    instance_type: str
    zone: str
    instances: int
    accelerators: int
    """Of one instance: GPUs, or Neuron devices."""
    start: float
    end: float
    fee: Decimal
    currency: str
    ultraserver: bool = False

    def usable_hours(self, lead: Lead, now: float) -> float:
        """In which warm replicas can serve: less what warming them takes, and the drain."""
        drain = ULTRASERVER_DRAIN_S if self.ultraserver else DRAIN_S
        return max(0.0, self.end - drain - max(self.start, now) - lead.total_s) / 3600

    def fee_per_usable_hour(self, lead: Lead, now: float) -> Decimal | None:
        """Of one accelerator, in `currency`; None where nothing of it is usable, or its accelerators are not known."""
        hours = Decimal(str(self.usable_hours(lead, now))) * self.instances * self.accelerators
        return self.fee / hours if hours else None


def rank(offerings: Iterable[Offering], lead: Lead, now: float) -> list[Offering]:
    """Cheapest usable accelerator-hour first, by currency; those without a price of that kind last."""

    def place(offering: Offering) -> tuple[bool, str, Decimal]:
        fee = offering.fee_per_usable_hour(lead, now)
        return fee is None, offering.currency, fee if fee is not None else offering.fee

    return sorted(offerings, key=place)
