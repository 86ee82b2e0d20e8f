"""Sensors: what starts runs when templates change, and when a clock in one of them turns.

What counts as a change is decided in `warmers/changes.py`; files are read in `resources/prompts.py`.
"""

import json
import time
from collections.abc import Iterator

import dagster as dg

from assets.partitions import fleets
from assets.tags import BECAUSE_TAG, FLEET_TAG
from pipelines.jobs import read_templates, stage_weights, warm
from pipelines.look import Look, read_cursor, write_cursor
from pipelines.runs import REPEAT, FleetRuns
from resources.workspace import Workspace
from warmers.changes import Watch
from warmers.errors import ConfigError, NotStaged, SourceUnavailable, WarmfrontError

TICK_S = 15
REVISION_S = 300
BUDGET_S = 20.0
"""A tick that takes a minute is ended by Dagster, and forgotten: fleets left over are the next tick's first."""


@dg.sensor(
    jobs=[warm, read_templates],
    minimum_interval_seconds=TICK_S,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Looks at every fleet's templates and asks for one run of the job warm where they changed; changes "
    "during a run gather for the next. Asks again, three times at most, where a run failed for a reason that may pass. "
    "A run's tag warmfront/because says what changed.",
)
def prompt_templates_changed(
    context: dg.SensorEvaluationContext, workspace: dg.ResourceParam[Workspace]
) -> dg.SensorResult:
    """Ask for one run of `warm` for each fleet whose templates are others than a run was last asked for.

    A file that cannot be read is reported by the check `templates_are_readable`, and keeps its last good version.
    While a run of the fleet is waiting or under way, changes gather for the next one.
    """
    cursor, began = read_cursor(context.cursor), time.monotonic()
    looks: list[Look] = []
    for fleet in cursor.in_turn(fleets.get_partition_keys()):
        if looks and time.monotonic() - began > BUDGET_S:
            cursor.first = fleet
            context.log.info(f"{fleet} and those after it: left to the next tick")
            break
        watch = cursor.watches.get(fleet) or Watch(epoch=int(workspace.clock.now()))
        look = Look(fleet, workspace, FleetRuns(context.instance, fleet), watch)
        looks.append(look)
        try:
            cursor.watches[fleet] = look.take()
        except NotStaged as error:
            look.notes.append(str(error))
        except (ConfigError, SourceUnavailable) as error:
            cursor.watches[fleet] = look.fail(str(error))
        except WarmfrontError as error:  # the state store is away: nothing is known, so nothing is remembered
            look.notes.append(str(error))
        except Exception as error:  # whatever it is, other fleets have their tick
            context.log.exception(f"looking at the templates of fleet {fleet!r}")
            look.notes.append(f"looking failed: {type(error).__name__}: {error}")
    notes = [f"{look.fleet}: {note}" for look in looks for note in look.notes]
    for note in notes:
        context.log.info(note)
    requests = [request for look in looks for request in look.requests]
    return dg.SensorResult(
        run_requests=requests,
        skip_reason=None if requests else "; ".join(notes) or "no template changed",
        asset_events=[event for look in looks for event in look.events],
        cursor=write_cursor(cursor),
    )


@dg.sensor(
    job=warm,
    minimum_interval_seconds=TICK_S,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Asks for a run of the job warm just after the date, or whatever else a clock says in a template, has "
    "turned: from then on the engine renders another text.",
)
def clock_turned(
    context: dg.SensorEvaluationContext, workspace: dg.ResourceParam[Workspace]
) -> Iterator[dg.RunRequest]:
    """Ask for a run of `warm` just after the date, or whatever a clock says in a template, has turned.

    A run that fails is asked for again by `prompt_templates_changed`.
    """
    for fleet in fleets.get_partition_keys():
        try:
            turns_at = (workspace.state.latest(fleet, "prefixes") or {}).get("turns_at")
            if turns_at is not None and workspace.clock.now() >= turns_at:
                yield dg.RunRequest(
                    run_key=f"{fleet}:turned:{turns_at:.0f}",
                    partition_key=fleet,
                    tags={FLEET_TAG: fleet, BECAUSE_TAG: "a clock turned"},
                )
        except WarmfrontError as error:
            context.log.warning(f"{fleet}: {error}")
        except Exception:  # whatever it is, other fleets have their tick
            context.log.exception(f"looking at the clocks of fleet {fleet!r}")


@dg.sensor(
    job=stage_weights,
    minimum_interval_seconds=REVISION_S,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Asks for a run of the job stage_weights where a fleet's source has another revision, or other files, "
    "than its stage was made from; again where the run failed for a reason that may pass. The next tick of "
    "prompt_templates_changed then asks for warming the new namespace.",
)
def model_revision_changed(
    context: dg.SensorEvaluationContext, workspace: dg.ResourceParam[Workspace]
) -> dg.SensorResult:
    """Ask for one run of `stage_weights` for each fleet whose source is another than a run was last asked for.

    One that failed for a reason that may pass is asked for again, as runs of `warm` are.
    """
    asked = read_asked(context.cursor)
    requests = []
    for fleet in fleets.get_partition_keys():
        try:
            if workspace.fleet_settings(fleet).model.source is None:
                continue
            seen = workspace.source_digest(fleet)
        except WarmfrontError as error:
            context.log.warning(f"{fleet}: {error}")
            continue
        except Exception:  # whatever it is, other fleets have their tick
            context.log.exception(f"looking at the weights of fleet {fleet!r}")
            continue
        runs, now = FleetRuns(context.instance, fleet), workspace.clock.now()
        changed = asked.get(fleet) != seen
        if not runs.unfinished() and (changed or runs.may_be_repeated("stage_weights", now)):
            asked[fleet] = seen
            because = "the source of the weights changed" if changed else REPEAT
            requests.append(
                dg.RunRequest(
                    run_key=f"{fleet}:stage:{seen}:{now:.0f}",
                    partition_key=fleet,
                    tags={FLEET_TAG: fleet, BECAUSE_TAG: because},
                )
            )
    return dg.SensorResult(run_requests=requests, cursor=json.dumps(asked))


def read_asked(cursor: str | None) -> dict[str, str]:
    """Digests of sources that a run was last asked for, by fleet; empty where there is no cursor, or a broken one."""
    try:
        return {str(fleet): str(digest) for fleet, digest in json.loads(cursor or "{}").items()}
    except (ValueError, AttributeError):
        return {}
