"""The fields of `capacity`: what a fleet's replicas run on in EC2, and when roll-outs may begin."""

from typing import Literal, get_args

from pydantic import Field, NonNegativeFloat, PositiveInt, field_validator

from resources.section import Section, known_timezone

Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
DAYS: tuple[Day, ...] = get_args(Day)
HOUR = r"^([01]\d|2[0-3]):[0-5]\d$"


class OffPeakSettings(Section):
    """One entry of `capacity.off_peak`: hours in which roll-outs may begin."""

    days: tuple[Day, ...] = DAYS
    since: str = Field(pattern=HOUR, description="HH:MM")
    until: str = Field(pattern=HOUR, description="HH:MM; before `since`: of the next day")
    timezone: str = "UTC"

    _known_timezone = field_validator("timezone")(known_timezone)


class CapacitySettings(Section):
    """`capacity`: what the fleet's replicas run on in EC2."""

    region: str = Field(min_length=1)
    instance_types: tuple[str, ...] = Field(min_length=1)
    instances: PositiveInt = Field(default=1, description="of a Capacity Block that is looked for")
    hours: PositiveInt = Field(default=24, description="of a Capacity Block that is looked for")
    provision_s: NonNegativeFloat = Field(default=600.0, description="until a new node is ready")
    load_s: NonNegativeFloat = Field(default=600.0, description="until an engine has its weights")
    warm_s: NonNegativeFloat = Field(default=900.0, description="for the canary, its warming and its proof")
    margin_s: NonNegativeFloat = 600.0
    off_peak: tuple[OffPeakSettings, ...] = ()
