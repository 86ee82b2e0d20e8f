"""EC2's capacity reservations, Capacity Blocks and offerings. Reads only: nothing here can buy."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any

from warmers.errors import CapacityUnavailable, ConfigError
from warmers.windows import Offering, Reservation

ACTIONS = (
    *("ec2:DescribeCapacityReservations", "ec2:DescribeCapacityBlocks", "ec2:DescribeCapacityBlockExtensionHistory"),
    *("ec2:DescribeCapacityBlockOfferings", "ec2:DescribeInstanceTypes"),
)
PAGE = 100
REFUSED = ("UnauthorizedOperation", "AuthFailure", "AccessDenied", "OptInRequired", "InvalidClientTokenId")
WRONG = (
    "InvalidParameterValue",
    "InvalidInstanceType",
    "InvalidParameter",
    "InvalidParameterCombination",
    "Unsupported",
)


@dataclass(frozen=True)
class Ec2Capacity:
    """Of one region, as credentials and endpoint in the environment have it."""

    region: str

    @cached_property
    def _client(self) -> Any:
        import boto3
        from botocore.config import Config

        config = Config(connect_timeout=5, read_timeout=30, retries={"mode": "standard", "total_max_attempts": 5})
        return boto3.client("ec2", region_name=self.region, config=config)

    def reservations(self, instance_types: Sequence[str]) -> list[Reservation]:
        """Those of some instance types, in every state. Raises CapacityUnavailable, ConfigError."""
        found = self._pages("describe_capacity_reservations", "CapacityReservations", MaxResults=PAGE)
        wanted = [one for one in found if one["InstanceType"] in instance_types]
        blocks = [one for one in wanted if one.get("ReservationType") == "capacity-block"]
        ultra, extensions = (self._ultraservers(), self._extensions()) if blocks else (frozenset[str](), {})
        return [_reservation(one, ultra, extensions) for one in wanted]

    def offerings(self, instance_type: str, instances: int, hours: int) -> list[Offering]:
        """What can be bought now. Raises CapacityUnavailable, ConfigError."""
        asked = {"InstanceType": instance_type, "InstanceCount": instances, "CapacityDurationHours": hours}
        found = list(self._pages("describe_capacity_block_offerings", "CapacityBlockOfferings", **asked))
        accelerators = self._accelerators(instance_type) if found else 0
        return [_offering(one, accelerators) for one in found]

    def _ultraservers(self) -> frozenset[str]:
        """Reservations that belong to UltraServers, which end earlier."""
        blocks = self._pages("describe_capacity_blocks", "CapacityBlocks", MaxResults=PAGE)
        return frozenset(
            id for block in blocks if block.get("UltraserverType") for id in block["CapacityReservationIds"]
        )

    def _extensions(self) -> dict[str, str]:
        """Extensions that were asked for and are not paid yet, by reservation."""
        found = self._pages("describe_capacity_block_extension_history", "CapacityBlockExtensions", MaxResults=PAGE)
        states = ((one["CapacityReservationId"], one["CapacityBlockExtensionStatus"]) for one in found)
        return {id: state for id, state in states if state == "payment-pending"}

    def _accelerators(self, instance_type: str) -> int:
        with _failures(f"describing instance type {instance_type} in {self.region}"):
            (found,) = self._client.describe_instance_types(InstanceTypes=[instance_type])["InstanceTypes"]
        devices = [*found.get("GpuInfo", {}).get("Gpus", ()), *found.get("NeuronInfo", {}).get("NeuronDevices", ())]
        return sum(int(device["Count"]) for device in devices)

    def _pages(self, call: str, what: str, **asked: Any) -> Iterator[Mapping[str, Any]]:
        token: dict[str, str] = {}
        while True:
            with _failures(f"{call} in {self.region}"):
                answer = getattr(self._client, call)(**asked, **token)
            yield from answer[what]
            if not answer.get("NextToken"):
                return
            token = {"NextToken": answer["NextToken"]}


def buy_command(offering: Offering, region: str) -> str:
    """What a person runs who decides to buy it. It has no client token: run twice, it buys twice."""
    return (
        f"aws ec2 purchase-capacity-block --region {region} --capacity-block-offering-id {offering.id} "
        "--instance-platform Linux/UNIX"
    )


def _reservation(one: Mapping[str, Any], ultra: frozenset[str], extensions: Mapping[str, str]) -> Reservation:
    end, block = one.get("EndDate"), one.get("ReservationType") == "capacity-block"
    return Reservation(
        id=one["CapacityReservationId"],
        kind="capacity-block" if block else "default",
        state=one["State"],
        instance_type=one["InstanceType"],
        zone=one["AvailabilityZone"],
        instances=int(one["TotalInstanceCount"]),
        available=int(one["AvailableInstanceCount"]),
        start=(one.get("StartDate") or one["CreateDate"]).timestamp(),
        end=end.timestamp() if end else None,
        ultraserver=one["CapacityReservationId"] in ultra,
        extension=extensions.get(one["CapacityReservationId"], ""),
    )


def _offering(one: Mapping[str, Any], accelerators: int) -> Offering:
    return Offering(
        id=one["CapacityBlockOfferingId"],
        instance_type=one["InstanceType"],
        zone=one["AvailabilityZone"],
        instances=int(one.get("InstanceCount") or 0),
        accelerators=accelerators,
        start=one["StartDate"].timestamp(),
        end=one["EndDate"].timestamp(),
        fee=Decimal(one["UpfrontFee"]),
        currency=one["CurrencyCode"],
        ultraserver=bool(one.get("UltraserverType")),
    )


@contextmanager
def _failures(doing: str) -> Iterator[None]:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", "unknown"))
        seen = f"{code}: {error.response.get('Error', {}).get('Message', '')}".rstrip(": ")
        if code in REFUSED:
            raise ConfigError(doing, seen=seen, do=f"Allow the role {', '.join(ACTIONS)}.") from error
        if code in WRONG:
            raise ConfigError(doing, seen=seen, do="Correct capacity.region or capacity.instance_types.") from error
        raise CapacityUnavailable(doing, seen=seen, do="Try again.") from error
    except (BotoCoreError, OSError) as error:
        seen = f"{type(error).__name__}: {error}"
        raise CapacityUnavailable(doing, seen=seen, do="Check endpoint, region and credentials.") from error
