"""Moto's EC2 with the capacity actions that it lacks, served over HTTP in botocore's own response shapes.

What they answer is in `State`, which a test fills; `faults` are error codes that come first, one for each call.
"""

import datetime
import importlib
from contextlib import contextmanager
from dataclasses import dataclass, field

PAGE = 2


@dataclass
class State:
    """What EC2 knows."""

    reservations: list = field(default_factory=list)
    blocks: list = field(default_factory=list)
    extensions: list = field(default_factory=list)
    offerings: list = field(default_factory=list)
    faults: list = field(default_factory=list)
    calls: list = field(default_factory=list)


def at(hours, origin=datetime.datetime(2026, 12, 7, 12, 0, tzinfo=datetime.UTC)):
    """A moment, in hours from noon of 7 December 2026."""
    return origin + datetime.timedelta(hours=hours)


def reservation(id, state="active", start=-1, end=24, kind="capacity-block", instance_type="p5.48xlarge", count=2):
    """One as EC2 gives it."""
    dates = {"StartDate": at(start), "CreateDate": at(start - 24)} | ({} if end is None else {"EndDate": at(end)})
    return {
        "CapacityReservationId": id, "State": state, "ReservationType": kind, "InstanceType": instance_type,
        "AvailabilityZone": "us-east-1a", "TotalInstanceCount": count, "AvailableInstanceCount": count, **dates,
    }  # fmt: skip


def offering(id, fee, start=24, hours=24, currency="USD", count=1, instance_type="p5.48xlarge"):
    """One as EC2 gives it."""
    return {
        "CapacityBlockOfferingId": id, "InstanceType": instance_type, "AvailabilityZone": "us-east-1b",
        "InstanceCount": count, "StartDate": at(start), "EndDate": at(start + hours), "UpfrontFee": fee,
        "CapacityBlockDurationHours": hours, "CurrencyCode": currency, "Tenancy": "default",
    }  # fmt: skip


@contextmanager
def ec2_server():
    """Serve; its address and what it answers."""
    from moto.core.responses import ActionResult
    from moto.server import ThreadedMotoServer

    responses = importlib.import_module("moto.ec2.responses").EC2Response
    exceptions = importlib.import_module("moto.ec2.exceptions")
    state = State()

    def action(name, key, of):
        def answer(self):
            state.calls.append(name)
            if state.faults:
                code = state.faults.pop(0)
                raise exceptions.EC2ClientError(code, "of the test")
            start = int(self._get_param("NextToken") or 0)
            found = of(self)
            more = {"NextToken": str(start + PAGE)} if start + PAGE < len(found) else {}
            return ActionResult({key: found[start : start + PAGE], **more})

        return answer

    wanted = {
        "describe_capacity_reservations": ("CapacityReservations", lambda _: state.reservations),
        "describe_capacity_blocks": ("CapacityBlocks", lambda _: state.blocks),
        "describe_capacity_block_extension_history": ("CapacityBlockExtensions", lambda _: state.extensions),
        "describe_capacity_block_offerings": (
            "CapacityBlockOfferings",
            lambda asked: [o for o in state.offerings if o["InstanceType"] == asked._get_param("InstanceType")],
        ),
    }
    before = {name: getattr(responses, name, None) for name in wanted}
    for name, (key, of) in wanted.items():
        setattr(responses, name, action(name, key, of))
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}", state
    finally:
        server.stop()
        for name, was in before.items():
            if was is None:
                delattr(responses, name)
            else:
                setattr(responses, name, was)
