"""Schedules: when jobs start without anybody asking."""

from collections.abc import Iterator

import dagster as dg

from assets.partitions import fleets
from assets.tags import FLEET_TAG
from pipelines.jobs import warm


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
