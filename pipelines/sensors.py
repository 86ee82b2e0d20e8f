"""Sensors: what starts runs when templates change, and when a clock in one of them turns.

What counts as a change is decided in `warmers/changes.py`; files are read in `resources/prompts.py`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import dagster as dg

from assets.partitions import fleets
from assets.prompts import DATA_VERSION_TAG, named_files, prompt_templates, templates_are_readable
from pipelines.jobs import warm
from pipelines.runs import FLEET_TAG, unfinished
from resources.workspace import Workspace
from warmers.changes import Changes, Listing, Watch, compare
from warmers.errors import WarmfrontError

if TYPE_CHECKING:
    from resources.objects import Stamp

CURSOR_VERSION = 1
TICK_S = 15
SETTLE_S = 2.0
"""A file that was written less than this ago may be half written: it is looked at by the next tick."""


@dg.sensor(job=warm, minimum_interval_seconds=TICK_S, default_status=dg.DefaultSensorStatus.RUNNING)
def prompt_templates_changed(
    context: dg.SensorEvaluationContext, workspace: dg.ResourceParam[Workspace]
) -> dg.SensorResult:
    """Ask for one run of `warm` for each fleet whose templates are others than a run was last asked for.

    While a run of the fleet is waiting or under way, changes gather for the next one.
    """
    watches = read_cursor(context.cursor)
    requests: list[dg.RunRequest] = []
    events: list[dg.AssetObservation | dg.AssetCheckEvaluation] = []
    notes: list[str] = []
    for fleet in fleets.get_partition_keys():
        look = Look(fleet, workspace, watches.get(fleet) or Watch(epoch=int(workspace.clock.now())))
        try:
            watches[fleet] = look.take(busy=unfinished(context.instance, fleet))
        except WarmfrontError as error:
            watches[fleet] = look.fail(str(error))
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


@dg.sensor(job=warm, minimum_interval_seconds=TICK_S, default_status=dg.DefaultSensorStatus.RUNNING)
def clock_turned(
    context: dg.SensorEvaluationContext, workspace: dg.ResourceParam[Workspace]
) -> Iterator[dg.RunRequest | dg.SkipReason]:
    """Ask for a run of `warm` just after the date, or whatever a clock says in a template, has turned."""
    for fleet in fleets.get_partition_keys():
        try:
            turns_at = (workspace.state.latest(fleet, "prefixes") or {}).get("turns_at")
        except WarmfrontError as error:
            yield dg.SkipReason(f"{fleet}: {error}")
            continue
        if turns_at is not None and workspace.clock.now() >= turns_at:
            yield dg.RunRequest(
                run_key=f"{fleet}:turned:{turns_at:.0f}",
                partition_key=fleet,
                tags={FLEET_TAG: fleet, "warmfront/because": "a clock turned"},
            )


@dataclass
class Look:
    """One look at one fleet's source: what it asks for, what it reports, what it remembers."""

    fleet: str
    workspace: Workspace
    watch: Watch

    def __post_init__(self) -> None:
        self.requests: list[dg.RunRequest] = []
        self.events: list[dg.AssetObservation | dg.AssetCheckEvaluation] = []
        self.notes: list[str] = []

    def take(self, *, busy: bool) -> Watch:
        """Look, and return what to remember. Raises WarmfrontError when the source or the state is away."""
        source = self.workspace.prompts(self.fleet)
        stamps = source.stamps()
        stamp = _stamp(stamps)
        if stamp == self.watch.stamp:
            return self.watch
        if any(0 <= self.workspace.clock.now() - s.modified_at < SETTLE_S for s in stamps.values()):
            self.notes.append("files are being written; looking again at the next tick")
            return self.watch
        before = self.workspace.state.listing(self.fleet)
        seen = source.read().listing.keeping(before)
        asked = seen.digest == self.watch.digest
        if busy and not asked:
            self.notes.append("templates changed; a run of this fleet is still waiting or under way")
            return self.watch
        if seen != before:
            self.workspace.state.save_listing(self.fleet, seen)
        self._report(seen)
        now = replace(self.watch, stamp=stamp, digest=seen.digest, trouble=seen.trouble)
        if asked or self._is_warm(seen):
            return now
        now = replace(now, epoch=now.epoch + 1)
        self._ask(seen, compare(before, seen), now.epoch)
        return now

    def fail(self, reason: str) -> Watch:
        """Report a source that could not be looked at, once; what was seen before stays in force."""
        listing = Listing(broken={self.fleet: reason})
        self._report(listing)
        return replace(self.watch, trouble=listing.trouble, stamp="")

    def _is_warm(self, seen: Listing) -> bool:
        """Whether somebody has warmed and proven exactly this: from the command line, or before there was a cursor."""
        state = self.workspace.state
        prefixes, proof = state.latest(self.fleet, "prefixes") or {}, state.latest(self.fleet, "proof") or {}
        warm = prefixes.get("templates") == proof.get("templates") == seen.digest
        return warm and proof.get("verdict") == "proven"

    def _ask(self, seen: Listing, changes: Changes, epoch: int) -> None:
        because = str(changes) or "templates changed"
        self.notes.append(because)
        self.requests.append(
            dg.RunRequest(
                run_key=f"{self.fleet}:{seen.digest}:{epoch}",
                partition_key=self.fleet,
                tags={FLEET_TAG: self.fleet, "warmfront/because": because[:200]},
            )
        )
        self.events.append(
            dg.AssetObservation(
                prompt_templates.key,
                partition=self.fleet,
                description=because,
                metadata={"templates": len(seen.templates), "broken": len(seen.broken)},
                tags={DATA_VERSION_TAG: seen.digest},
            )
        )

    def _report(self, seen: Listing) -> None:
        """Say which files cannot be read, when it is others than last time."""
        if seen.trouble == self.watch.trouble:
            return
        broken = ", ".join(seen.broken)
        self.notes.append(f"cannot be read: {broken}" if broken else "everything can be read again")
        self.events.append(
            dg.AssetCheckEvaluation(
                asset_key=prompt_templates.key,
                check_name=templates_are_readable.check_key.name,
                passed=not seen.broken,
                severity=dg.AssetCheckSeverity.WARN,
                description=named_files(seen.broken) or None,
                partition=self.fleet,
            )
        )


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
