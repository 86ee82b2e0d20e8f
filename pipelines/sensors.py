"""Sensors: what starts runs when templates change, and when a clock in one of them turns.

What counts as a change is decided in `warmers/changes.py`; files are read in `resources/prompts.py`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

import dagster as dg

from assets.partitions import fleets
from assets.prompts import DATA_VERSION_TAG, prompt_templates
from pipelines.jobs import read_templates, warm
from pipelines.runs import FLEET_TAG, PARTITION_TAG, unfinished
from resources.workspace import Workspace
from warmers.changes import Listing, Watch, compare
from warmers.errors import ConfigError, SourceUnavailable, WarmfrontError

if TYPE_CHECKING:
    from resources.objects import Stamp

CURSOR_VERSION = 1
TICK_S = 15
SETTLE_S = 2.0
"""A file that was written less than this ago may be half written: it is looked at by the next tick."""


@dg.sensor(
    jobs=[warm, read_templates],
    minimum_interval_seconds=TICK_S,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Looks at every fleet's templates and asks for one run of the job warm where it changed; changes "
    "during a run gather for the next. A run's tag warmfront/because says what changed.",
)
def prompt_templates_changed(
    context: dg.SensorEvaluationContext, workspace: dg.ResourceParam[Workspace]
) -> dg.SensorResult:
    """Ask for one run of `warm` for each fleet whose templates are others than a run was last asked for.

    A file that cannot be read is reported by the check `templates_are_readable`, and keeps its last good version.
    While a run of the fleet is waiting or under way, changes gather for the next one.
    """
    watches = read_cursor(context.cursor)
    requests: list[dg.RunRequest] = []
    events: list[dg.AssetObservation] = []
    notes: list[str] = []
    for fleet in fleets.get_partition_keys():
        look = Look(fleet, workspace, watches.get(fleet) or Watch(epoch=int(workspace.clock.now())))
        try:
            watches[fleet] = look.take(busy=unfinished(context.instance, fleet))
        except (ConfigError, SourceUnavailable) as error:
            watches[fleet] = look.fail(str(error))
        except WarmfrontError as error:  # the state store is away: nothing is known, so nothing is remembered
            look.notes.append(str(error))
        requests += look.requests
        events += look.events
        notes += [f"{fleet}: {note}" for note in look.notes]
    for note in notes:
        context.log.info(note)
    return dg.SensorResult(
        run_requests=requests,
        skip_reason=None if requests else "; ".join(notes) or "no template changed",
        asset_events=events,
        cursor=write_cursor(watches),
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
    """Ask for a run of `warm` just after the date, or whatever a clock says in a template, has turned."""
    for fleet in fleets.get_partition_keys():
        try:
            turns_at = (workspace.state.latest(fleet, "prefixes") or {}).get("turns_at")
        except WarmfrontError as error:
            context.log.warning(f"{fleet}: {error}")
            continue
        if turns_at is not None and workspace.clock.now() >= turns_at:
            yield dg.RunRequest(
                run_key=f"{fleet}:turned:{turns_at:.0f}",
                partition_key=fleet,
                tags={FLEET_TAG: fleet, "warmfront/because": "a clock turned"},
            )


@dataclass
class Look:
    """One look at one fleet's source: what it asks for, what it says, what it remembers."""

    fleet: str
    workspace: Workspace
    watch: Watch
    requests: list[dg.RunRequest] = field(default_factory=list)
    events: list[dg.AssetObservation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def take(self, *, busy: bool) -> Watch:
        """Look, and return what to remember. Raises WarmfrontError when the source or the state is away."""
        source, state = self.workspace.prompts(self.fleet), self.workspace.state
        stamps = source.stamps()
        stamp = _stamp(stamps)
        if stamp == self.watch.stamp:
            return self.watch
        if any(0 <= self.workspace.clock.now() - s.modified_at < SETTLE_S for s in stamps.values()):
            self.notes.append("files are being written; looking again at the next tick")
            return self.watch
        before = state.listing(self.fleet)
        seen = source.read().listing.keeping(before)
        asked = seen.digest == self.watch.digest
        if busy and not asked:
            self.notes.append("templates changed; a run of this fleet is still waiting or under way")
            return self.watch
        if seen != before:
            state.save_listing(self.fleet, seen)
        now = replace(self.watch, stamp=stamp, digest=seen.digest)
        if asked or self._is_warm(seen):
            return self._report(seen, now)
        because = str(compare(before, seen)) or "templates changed"
        return self._ask("warm", seen, because, replace(now, trouble=seen.trouble))

    def fail(self, reason: str) -> Watch:
        """Report a source that could not be looked at, once; what was seen before stays in force."""
        return self._report(Listing(broken={self.fleet: reason}), replace(self.watch, stamp=""))

    def _is_warm(self, seen: Listing) -> bool:
        """Whether somebody has warmed and proven exactly this: from the command line, or before there was a cursor."""
        state = self.workspace.state
        prefixes, proof = state.latest(self.fleet, "prefixes") or {}, state.latest(self.fleet, "proof") or {}
        warm = prefixes.get("templates") == proof.get("templates") == seen.digest
        return warm and proof.get("verdict") == "proven"

    def _report(self, seen: Listing, now: Watch) -> Watch:
        """Have the check say what cannot be read, when that is other than last time.

        By a run: Dagster 1.13 takes one check evaluation of a partition from sensors, and fails at the second.
        """
        if seen.trouble == now.trouble:
            return now
        because = f"cannot be read: {', '.join(seen.broken)}" if seen.broken else "everything can be read again"
        return self._ask("read_templates", seen, because, replace(now, trouble=seen.trouble))

    def _ask(self, job: str, seen: Listing, because: str, now: Watch) -> Watch:
        now = replace(now, epoch=now.epoch + 1)
        self.notes.append(because)
        self.requests.append(
            dg.RunRequest(
                run_key=f"{self.fleet}:{job}:{now.digest}:{now.epoch}",
                job_name=job,
                # Dagster 1.13 takes a job of checks alone for one without partitions; the tag gives it one.
                partition_key=self.fleet if job == "warm" else None,
                tags={PARTITION_TAG: self.fleet, FLEET_TAG: self.fleet, "warmfront/because": because[:200]},
            )
        )
        self.events.append(
            dg.AssetObservation(
                prompt_templates.key,
                partition=self.fleet,
                description=because,
                metadata={"templates": len(seen.templates), "broken": len(seen.broken)},
                tags={DATA_VERSION_TAG: now.digest},
            )
        )
        return now


def read_cursor(text: str | None) -> dict[str, Watch]:
    """Watches by fleet; empty where there is no cursor, or one that this version cannot read."""
    try:
        found = json.loads(text or "{}")
        if found.get("version") != CURSOR_VERSION:
            return {}
        return {str(fleet): Watch(**watch) for fleet, watch in found["fleets"].items()}
    except (ValueError, TypeError, AttributeError, KeyError):
        return {}


def write_cursor(watches: Mapping[str, Watch]) -> str:
    """The cursor of these watches."""
    fleets = {fleet: asdict(watch) for fleet, watch in sorted(watches.items())}
    return json.dumps({"version": CURSOR_VERSION, "fleets": fleets})


def _stamp(stamps: Mapping[str, "Stamp"]) -> str:
    from hashlib import sha256

    return sha256(repr(sorted(stamps.items())).encode()).hexdigest()[:16]
