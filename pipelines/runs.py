"""Running a job from the command line, on the Dagster instance that the UI shows."""

import fcntl
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resources.processes import start_ticks
from resources.workspace import Workspace

if TYPE_CHECKING:
    import dagster as dg

INSTANCE_YAML = Path(__file__).with_name("dagster.yaml")
FLEET_TAG = "warmfront/fleet"
PARTITION_TAG = "dagster/partition"
PROCESS_TAG = "warmfront/process"
"""Host, pid and start of the process that executes a run from the command line."""
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


def open_instance(workspace: Workspace) -> "dg.DagsterInstance":
    """The instance; two that make its tables at once would fail, so they take turns."""
    import dagster as dg

    home = instance_directory(workspace)
    with (home / ".opening").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        return dg.DagsterInstance.from_config(str(home))


def run_job(name: str, fleet: str, workspace: Workspace) -> Finished:
    """Run a job for one fleet in this process. Raises KeyboardInterrupt when a step was interrupted."""
    from assets.reporting import INTERRUPTED
    from pipelines.definitions import build_defs

    job = build_defs(workspace).resolve_job_def(name)
    with open_instance(workspace) as instance:
        unfinished(instance, fleet)
        result = job.execute_in_process(
            partition_key=fleet,
            instance=instance,
            raise_on_error=False,
            run_config=QUIET,
            tags={FLEET_TAG: fleet, PROCESS_TAG: _process(os.getpid())},
        )
    failures = (event.step_failure_data.user_failure_data for event in result.all_events if event.is_step_failure)
    if any(data is not None and INTERRUPTED in data.metadata for data in failures):
        raise KeyboardInterrupt
    return Finished(result.run_id, result.success, tuple(_reasons(result)))


def unfinished(instance: "dg.DagsterInstance", fleet: str) -> bool:
    """Whether a run of the fleet waits or is under way; one whose process was killed is ended as failed first."""
    import dagster as dg

    ended = {dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED}
    open_statuses = [status for status in dg.DagsterRunStatus if status not in ended]
    found = instance.get_runs(dg.RunsFilter(tags={PARTITION_TAG: fleet}, statuses=open_statuses))
    dead = [run for run in found if _is_dead(run.tags.get(PROCESS_TAG))]
    for run in dead:
        instance.report_run_failed(run, "Its process was killed; what it had finished is recorded. Run again.")
    return len(found) > len(dead)


def _process(pid: int) -> str:
    return f"{socket.gethostname()}:{pid}:{start_ticks(pid)}"


def _is_dead(process: str | None) -> bool:
    """Whether a process of this host is gone; of another host, or of none that is named, nothing is known."""
    host, _, rest = (process or "").partition(":")
    return host == socket.gethostname() and process != _process(int(rest.partition(":")[0]))


def _reasons(result: "dg.ExecuteInProcessResult") -> list[str]:
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
