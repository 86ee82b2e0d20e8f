"""One look at one fleet's templates: what has to be run, and what to remember until the next tick.

Going through the fleets belongs in `pipelines/sensors.py`.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

import dagster as dg

from assets.prompts import prompt_templates
from assets.tags import BECAUSE_TAG, DATA_VERSION_TAG, FLEET_TAG, PARTITION_TAG
from pipelines.runs import REPEAT, FleetRuns
from resources.workspace import Workspace
from warmers.changes import Listing, Watch, compare

CURSOR_VERSION = 3
SETTLE_S = 2.0
"""A file that was written less than this ago may be half written: it is looked at by the next tick."""
PATIENCE = 4
"""Ticks that one such file may hold up the others of its fleet."""
MAX_REPEATS = 3
"""Runs asked for because the one before read other templates; more would mean that it never reads these."""


@dataclass
class Look:
    """One look: what it asks for, what it says."""

    fleet: str
    workspace: Workspace
    runs: FleetRuns
    watch: Watch
    requests: list[dg.RunRequest] = field(default_factory=list)
    events: list[dg.AssetObservation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def take(self) -> Watch:
        """Look, and return what to remember. Raises WarmfrontError when the source or the state is away."""
        source, state = self.workspace.prompts(self.fleet), self.workspace.state
        files = source.stamps()
        before = state.listing(self.fleet)
        changed = source.changed(before, files)
        if self.runs.unfinished():
            if changed:
                self.notes.append("templates changed; a run of this fleet is still waiting or under way")
            return self.watch
        fresh = {path for path, at in changed.items() if 0 <= self.workspace.clock.now() - at < SETTLE_S}
        if fresh and self.watch.waited < PATIENCE:
            self.notes.append(f"{min(fresh)} is being written; looking again at the next tick")
            return replace(self.watch, waited=self.watch.waited + 1)
        seen = source.look(before, files, changed.keys() - fresh) if changed else before
        if seen != before:
            state.save_listing(self.fleet, seen)
        return self._decide(before, seen, replace(self.watch, digest=seen.digest, waited=0))

    def fail(self, reason: str) -> Watch:
        """Report a source that could not be looked at, once; what was seen before stays in force."""
        return self._report(Listing(broken={self.fleet: reason}), self.watch)

    def _decide(self, before: Listing, seen: Listing, now: Watch) -> Watch:
        keyspace = self.workspace.fleet(self.fleet).keyspace  # raises NotStaged: then there is nothing to warm yet
        now = replace(now, keyspace=keyspace)
        if (seen.digest, keyspace) != (self.watch.digest, self.watch.keyspace):
            now = replace(now, repeats=0)
            if not self._is_warm(seen, keyspace):
                return self._ask("warm", seen, self._because(before, seen), now)
        elif self.runs.may_be_repeated("warm", self.workspace.clock.now()):
            return self._ask("warm", seen, REPEAT, now)
        elif self._lost_chunks():
            return self._ask("warm", seen, "L2 has lost warmed chunks", now)
        elif now.repeats < MAX_REPEATS and self._read_otherwise(seen):
            now = replace(now, repeats=now.repeats + 1)
            return self._ask("warm", seen, "templates were others while the last run read them", now)
        return self._report(seen, now)

    def _because(self, before: Listing, seen: Listing) -> str:
        other = seen.digest == self.watch.digest
        return str(compare(before, seen)) or ("weights, adapters or engine changed" if other else "templates changed")

    def _is_warm(self, seen: Listing, keyspace: str) -> bool:
        """Whether somebody has warmed and proven exactly this: from the command line, or before there was a cursor."""
        state = self.workspace.state
        prefixes, proof = state.latest(self.fleet, "prefixes") or {}, state.latest(self.fleet, "proof") or {}
        warm = prefixes.get("templates") == proof.get("templates") == seen.digest
        return warm and (proof.get("verdict"), proof.get("keyspace")) == ("proven", keyspace)

    def _lost_chunks(self) -> bool:
        """Whether somebody who looked into L2 since the last run of `warm` found less than was warmed."""
        state = self.workspace.state
        stock, warmed = state.latest(self.fleet, "inventory") or {}, state.latest(self.fleet, "warm") or {}
        return stock.get("hit_rate", 1.0) < 1.0 and stock["at"] > warmed.get("at", 0.0) and self.runs.last_succeeded()

    def _read_otherwise(self, seen: Listing) -> bool:
        """Whether the last run warmed other templates than these: they changed while it waited, and changed back."""
        warmed = (self.workspace.state.latest(self.fleet, "prefixes") or {}).get("templates")
        return warmed != seen.digest and self.runs.last_succeeded()

    def _report(self, seen: Listing, now: Watch) -> Watch:
        """Have the check say what cannot be read, when that is other than last time.

        By a run: Dagster 1.13 takes one check evaluation of a partition from sensors, and fails at the second.
        """
        if seen.trouble == now.trouble:
            repeat = self.runs.may_be_repeated("read_templates", self.workspace.clock.now())
            return self._ask("read_templates", seen, REPEAT, now) if repeat else now
        because = f"cannot be read: {', '.join(seen.broken)}" if seen.broken else "everything can be read again"
        return self._ask("read_templates", seen, because, now)

    def _ask(self, job: str, seen: Listing, because: str, now: Watch) -> Watch:
        now = replace(now, epoch=now.epoch + 1, trouble=seen.trouble)
        self.notes.append(because)
        self.requests.append(
            dg.RunRequest(
                run_key=f"{self.fleet}:{job}:{now.digest}:{now.epoch}",
                job_name=job,
                # Dagster 1.13 takes a job of checks alone for one without partitions; the tag gives it one.
                partition_key=self.fleet if job == "warm" else None,
                tags={PARTITION_TAG: self.fleet, FLEET_TAG: self.fleet, BECAUSE_TAG: because[:200]},
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


@dataclass(slots=True)
class Cursor:
    """What the sensor remembers."""

    watches: dict[str, Watch] = field(default_factory=dict)
    first: str = ""
    """The fleet to begin with: the last tick's time was up before it."""

    def in_turn(self, fleets: Sequence[str]) -> list[str]:
        """All fleets, from `first` on; the next tick begins with the first again unless told otherwise."""
        at = fleets.index(self.first) if self.first in fleets else 0
        self.first = ""
        return [*fleets[at:], *fleets[:at]]


def read_cursor(text: str | None) -> Cursor:
    """The cursor; an empty one where there is none, or one that this version cannot read."""
    try:
        found = json.loads(text or "{}")
        if found.get("version") != CURSOR_VERSION:
            return Cursor()
        return Cursor({str(fleet): Watch(**watch) for fleet, watch in found["fleets"].items()}, str(found["first"]))
    except (ValueError, TypeError, AttributeError, KeyError):
        return Cursor()


def write_cursor(cursor: Cursor) -> str:
    """As text."""
    fleets = {fleet: asdict(watch) for fleet, watch in sorted(cursor.watches.items())}
    return json.dumps({"version": CURSOR_VERSION, "fleets": fleets, "first": cursor.first})
