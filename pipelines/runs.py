"""Running a job from the command line, on the Dagster instance that the UI shows."""

import fcntl
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any
from uuid import uuid4

import dagster as dg

from assets.reporting import INTERRUPTED, MAY_PASS
from assets.tags import BECAUSE_TAG, FLEET_TAG, PARTITION_TAG, PROCESS_TAG, process_of, process_tag
from resources.proc import is_gone
from resources.workspace import Workspace

INSTANCE_YAML = Path(__file__).with_name("dagster.yaml")
PAUSES_S = (60.0, 300.0, 1800.0)
"""After a run that failed, after its first repeat and after its second, before it is repeated; then somebody has to."""
REPEAT = "the last run failed for a reason that may have passed"
QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}


@dataclass(frozen=True, slots=True)
class Finished:
    """How a run ended."""

    run_id: str
    success: bool
    reasons: tuple[str, ...]
    """Why not: what failed steps and failed checks said."""


def instance_directory(workspace: Workspace) -> Path:
    """DAGSTER_HOME, else `<state>/dagster`, made ready for use."""
    named = os.environ.get("DAGSTER_HOME")
    home = Path(named) if named else workspace.local_directory / "dagster"
    home.mkdir(parents=True, exist_ok=True)
    shipped, there = INSTANCE_YAML.read_text(), home / "dagster.yaml"
    if not there.exists() or there.read_text().partition("\n")[0] == shipped.partition("\n")[0]:
        there.write_text(shipped)
    return home


def open_instance(workspace: Workspace) -> dg.DagsterInstance:
    """The instance; two that make its tables at once would fail, so they take turns."""
    home = instance_directory(workspace)
    with (home / ".opening").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        return dg.DagsterInstance.from_config(str(home))


def run_job(name: str, fleet: str, workspace: Workspace, ops: Mapping[str, Any] | None = None) -> Finished:
    """Run a job for one fleet in this process. Raises KeyboardInterrupt when a step was interrupted.

    `ops`: configuration by asset.
    """
    from pipelines.definitions import build_defs

    job = build_defs(workspace).resolve_job_def(name)
    with open_instance(workspace) as instance:
        FleetRuns(instance, fleet).unfinished()
        run_id = str(uuid4())
        result = job.execute_in_process(
            partition_key=fleet,
            instance=instance,
            raise_on_error=False,
            run_config={**QUIET, "ops": {name: {"config": config} for name, config in (ops or {}).items()}},
            run_id=run_id,
            tags={FLEET_TAG: fleet, PROCESS_TAG: process_tag(run_id)},
        )
    failures = (event.step_failure_data.user_failure_data for event in result.all_events if event.is_step_failure)
    if any(data is not None and INTERRUPTED in data.metadata for data in failures):
        raise KeyboardInterrupt
    return Finished(result.run_id, result.success, tuple(_reasons(result)))


@dataclass(frozen=True, slots=True)
class FleetRuns:
    """The runs of one fleet on an instance, whoever started them."""

    instance: dg.DagsterInstance
    fleet: str

    def unfinished(self) -> bool:
        """Whether one waits or is under way; one whose process was killed is ended as failed first."""
        ended = {dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED}
        open_statuses = [status for status in dg.DagsterRunStatus if status not in ended]
        found = self.instance.get_runs(dg.RunsFilter(tags={PARTITION_TAG: self.fleet}, statuses=open_statuses))
        dead = [run for run in found if is_gone(process_of(run))]
        for run in dead:
            self.instance.report_run_failed(run, "Its process was killed; what it had finished is recorded. Run again.")
        return len(found) > len(dead)

    def last_succeeded(self) -> bool:
        """Whether the last run of the job `warm` was a success."""
        return any(record.dagster_run.is_success for record in self._latest("warm", 1))

    def may_be_repeated(self, job: str, now: float) -> bool:
        """Whether the last run of a job failed for a reason that may have passed, and was not repeated too often."""
        latest = self._latest(job, len(PAUSES_S) + 1)
        repeats = list(takewhile(lambda record: record.dagster_run.tags.get(BECAUSE_TAG) == REPEAT, latest))
        if not latest or len(repeats) == len(PAUSES_S):
            return False
        waited = now - (latest[0].end_time or now)
        return waited >= PAUSES_S[len(repeats)] and self._may_pass(latest[0].dagster_run)

    def _latest(self, job: str, limit: int) -> Sequence[dg.RunRecord]:
        of_fleet = dg.RunsFilter(job_name=job, tags={PARTITION_TAG: self.fleet})
        return self.instance.get_run_records(of_fleet, limit=limit)

    def _may_pass(self, run: dg.DagsterRun) -> bool:
        """Whether a retry may see something else: its process was killed, or every failed step says so."""
        if run.status != dg.DagsterRunStatus.FAILURE:
            return False
        events = self.instance.all_logs(run.run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
        said = (entry.get_dagster_event().step_failure_data.user_failure_data for entry in events)
        return all(data is not None and MAY_PASS in data.metadata for data in said)


def _reasons(result: dg.ExecuteInProcessResult) -> list[str]:
    reasons: list[str] = []
    for event in result.all_events:
        if event.is_step_failure:
            data = event.step_failure_data
            said = data.user_failure_data.description if data.user_failure_data else None
            message = said or (data.error.message if data.error else "failed")
            if data.user_failure_data or "DagsterAssetCheckFailedError" not in message:
                reasons.append(f"{event.step_key}: {message.strip()}")
        check: Any = event.event_specific_data if event.event_type_value == "ASSET_CHECK_EVALUATION" else None
        if check is not None and not check.passed:
            reasons.append(f"{check.severity.value.lower()} {check.check_name}: {check.description or 'failed'}")
    return reasons


if __name__ == "__main__":
    here = Workspace.from_environment(lambda _: None)
    open_instance(here).dispose()
    print(instance_directory(here))  # noqa: T201 - for the Makefile
