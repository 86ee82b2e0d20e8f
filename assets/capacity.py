"""Beside the story: the capacity that roll-outs can count on."""

import dagster as dg

from assets.partitions import fleets
from assets.reporting import ONCE_MORE, OWNERS, failures, table
from resources.workspace import Workspace


@dg.asset(
    partitions_def=fleets,
    group_name="serving",
    owners=OWNERS,
    kinds={"ec2"},
    retry_policy=ONCE_MORE,
)
def capacity_windows(
    context: dg.AssetExecutionContext, workspace: dg.ResourceParam[Workspace]
) -> dg.MaterializeResult[None]:
    """When the fleet's reserved capacity is there, and until when a roll-out into it may still begin.

    Read from EC2 each time, since an extension moves the end of a Capacity Block. Buys nothing.
    """
    with failures():
        seen = workspace.capacity(context.partition_key)
    if seen is None:
        return dg.MaterializeResult(metadata={"capacity": "warmfront.yaml names none for this fleet"})
    document = seen.document()
    return dg.MaterializeResult(
        metadata={
            "roll_out_at": document["roll_out_at"] or "not in what is in sight",
            "usable": sum(window.usable for window in seen.windows),
            "lead_minutes": round(seen.lead.total_s / 60, 1),
            "windows": table(document["windows"]),
        }
    )
