"""What a fleet's capacity looks like now: its windows, when a roll-out may begin, what could be bought."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from resources.capacity_settings import CapacitySettings
from resources.config import lead_of, off_peak_of
from resources.ec2_capacity import Ec2Capacity, buy_command
from warmers.windows import Admission, Lead, Offering, Window, admission, rank, window_of


@dataclass(frozen=True, slots=True)
class Capacity:
    """Seen at one moment."""

    at: float
    region: str
    lead: Lead
    windows: tuple[Window, ...]
    admission: Admission | None
    """None: no roll-out can begin in reserved capacity that is in sight."""
    offerings: tuple[Offering, ...] = ()

    def document(self) -> dict[str, Any]:
        """As JSON: times in UTC, fees as EC2 gives them."""
        return {
            "at": shown(self.at),
            "lead_s": self.lead.total_s,
            "roll_out_at": shown(self.admission.at) if self.admission else None,
            "windows": [self._window(window) for window in self.windows],
            "offerings": [self._offering(offering) for offering in self.offerings],
        }

    def _window(self, window: Window) -> dict[str, Any]:
        one = window.reservation
        last = window.admits_until(self.lead)
        return {
            "reservation": one.id,
            "kind": one.kind,
            "state": one.state,
            "instance_type": one.instance_type,
            "zone": one.zone,
            "instances": one.instances,
            "available": one.available,
            "opens_at": shown(window.opens_at),
            "drains_at": shown(window.closes_at),
            "ends_at": shown(one.end),
            "admits_until": shown(last),
            "usable": window.usable,
            "note": window.why_not or (f"an extension is {one.extension}" if one.extension else ""),
        }

    def _offering(self, offering: Offering) -> dict[str, Any]:
        each = offering.fee_per_usable_hour(self.lead, self.at)
        return {
            "offering": offering.id,
            "instance_type": offering.instance_type,
            "zone": offering.zone,
            "instances": offering.instances,
            "starts_at": shown(offering.start),
            "ends_at": shown(offering.end),
            "fee": str(offering.fee),
            "currency": offering.currency,
            "usable_hours": round(offering.usable_hours(self.lead, self.at), 2),
            "fee_per_usable_accelerator_hour": None if each is None else f"{each:.4f}",
            "buy": buy_command(offering, self.region),
        }


def look(settings: CapacitySettings, now: float, *, offerings: bool = False) -> Capacity:
    """Ask EC2. Raises CapacityUnavailable, ConfigError."""
    ec2, lead = Ec2Capacity(settings.region), lead_of(settings)
    reservations = ec2.reservations(settings.instance_types)
    windows = sorted((window_of(one, now) for one in reservations), key=lambda w: (not w.usable, w.opens_at))
    offered: list[Offering] = []
    if offerings:
        for instance_type in settings.instance_types:
            offered += ec2.offerings(instance_type, settings.instances, settings.hours)
    admitted = admission(windows, lead, off_peak_of(settings), now)
    return Capacity(now, settings.region, lead, tuple(windows), admitted, tuple(rank(offered, lead, now)))


def shown(at: float | None) -> str | None:
    """A moment as people and programs read it."""
    return None if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
