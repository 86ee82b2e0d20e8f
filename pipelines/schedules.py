"""Schedules: when jobs start without anybody asking."""

from collections.abc import Iterator

import dagster as dg

from assets.partitions import fleets
from assets.tags import FLEET_TAG
from pipelines.jobs import take_stock, warm
from resources.workspace import Workspace
from warmers.errors import WarmfrontError


@dg.schedule(
    job=warm,
    cron_schedule="0 3 * * *",
    execution_timezone="UTC",
    default_status=dg.DefaultScheduleStatus.RUNNING,
    description="Warm and prove every fleet at 03:00 UTC, one run a fleet: what was evicted comes back before the day.",
)
def nightly_warm(context: dg.ScheduleEvaluationContext) -> Iterator[dg.RunRequest]:
    """A run a fleet and night."""
    night = context.scheduled_execution_time.date().isoformat()
    for fleet in fleets.get_partition_keys():
        yield dg.RunRequest(run_key=f"{fleet}:{night}", partition_key=fleet, tags={FLEET_TAG: fleet})


@dg.schedule(
    job=take_stock,
    cron_schedule="20 * * * *",
    execution_timezone="UTC",
    default_status=dg.DefaultScheduleStatus.RUNNING,
    description="Look into L2 at twenty past each hour, one run for each fleet that was warmed: what its prefixes need "
    "is extended before half of its life is over.",
)
def hourly_stock(
    context: dg.ScheduleEvaluationContext, workspace: dg.ResourceParam[Workspace]
) -> Iterator[dg.RunRequest]:
    """A run a fleet and hour, where it was warmed and its L2 is there."""
    hour = context.scheduled_execution_time.isoformat()
    for fleet in fleets.get_partition_keys():
        try:
            workspace.tier(fleet).address()
            warmed = workspace.state.latest(fleet, "warm") is not None
        except WarmfrontError as error:
            context.log.info(f"{fleet}: {error}")
        else:
            if warmed:
                yield dg.RunRequest(run_key=f"{fleet}:{hour}", partition_key=fleet, tags={FLEET_TAG: fleet})
