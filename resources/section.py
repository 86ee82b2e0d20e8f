"""What all sections of warmfront.yaml have in common."""

from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One section: it may not change, and has no fields but its own."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def known_timezone(timezone: str) -> str:
    """Raises ValueError for one that the IANA database does not have."""
    try:
        ZoneInfo(timezone)
    except (ZoneInfoNotFoundError, ValueError):
        raise ValueError(f"{timezone!r} is no time zone of the IANA database") from None
    return timezone
