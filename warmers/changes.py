"""What became different in a source of templates between two looks at it, and whether that asks for a run.

Looking at a source belongs in `resources/prompts.py`, asking for a run in `pipelines/sensors.py`.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import NamedTuple

CANDIDATE = ".candidate"
"""End of the name of a template's next version, which stands beside the live one until it is promoted."""


class Entry(NamedTuple):
    """One template or context of it."""

    source: str
    """The file it comes from."""
    digest: str
    """Of everything that shapes its token ids, keys and order."""


class SourceFile(NamedTuple):
    """One file as it was when it was read."""

    stamp: str
    """Another one means that it has to be read again."""
    documents: tuple[str, ...]
    """Other files that it names."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What a source held at one time."""

    templates: Mapping[str, Entry] = field(default_factory=dict)
    """By label."""
    broken: Mapping[str, str] = field(default_factory=dict)
    """Files that could not be read, and why."""
    files: Mapping[str, SourceFile] = field(default_factory=dict)
    """Template files that need not be read again while they stay as they are."""

    @property
    def digest(self) -> str:
        """Of the templates that could be read, wherever their files are; 16 hex digits."""
        return _digest({label: entry.digest for label, entry in self.templates.items()})

    @property
    def trouble(self) -> str:
        """Digest of what could not be read; empty when nothing."""
        return _digest(self.broken) if self.broken else ""

    def keeping(self, before: "Listing", kept: Collection[str] = ()) -> "Listing":
        """This, with all that `before` had of `kept` files, and of broken ones the templates.

        Their last good version stays in force.
        """
        files = {path: file for path, file in before.files.items() if path in kept}
        broken = {path: reason for path, reason in before.broken.items() if path in kept}
        sources = {*kept, *self.broken}
        entries = {label: entry for label, entry in before.templates.items() if entry.source in sources}
        return Listing(entries | dict(self.templates), broken | dict(self.broken), files | dict(self.files))


@dataclass(frozen=True, slots=True)
class Watch:
    """What is remembered of one source from tick to tick."""

    digest: str = ""
    """Of the listing that a run was last asked for, or that was found warm."""
    trouble: str = ""
    """Of what was last reported as unreadable."""
    epoch: int = 0
    """Grows with every run that is asked for: run keys are remembered for ever, and A may come back after B."""
    keyspace: str = ""
    """That a run was last asked for: other weights, adapters or engines need it anew."""
    waited: int = 0
    """Ticks in a row that waited for somebody to finish writing."""
    repeats: int = 0
    """Runs asked for again because the one before had read something else."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Labels, by what happened to them."""

    new: tuple[str, ...]
    changed: tuple[str, ...]
    deleted: tuple[str, ...]
    promoted: tuple[str, ...]
    """What was the candidate is live now."""

    def __str__(self) -> str:
        named = {"new": self.new, "changed": self.changed, "deleted": self.deleted, "promoted": self.promoted}
        return "; ".join(f"{kind}: {_shown(labels)}" for kind, labels in named.items() if labels)


def compare(before: Listing, after: Listing) -> Changes:
    """What happened between two listings."""
    old, new = before.templates, after.templates
    differing = {label for label in new if label not in old or old[label].digest != new[label].digest}
    promoted = {
        label
        for label in differing
        if (candidate := candidate_of(label)) in old
        and candidate not in new
        and old[candidate].digest == new[label].digest
    }
    gone = old.keys() - new.keys() - {candidate_of(label) for label in promoted}
    rest = differing - promoted
    return Changes(
        new=tuple(sorted(rest - old.keys())),
        changed=tuple(sorted(rest & old.keys())),
        deleted=tuple(sorted(gone)),
        promoted=tuple(sorted(promoted)),
    )


def candidate_of(label: str) -> str:
    """The label that a template's candidate has, or would have."""
    name, slash, context = label.partition("/")
    return f"{name}{CANDIDATE}{slash}{context}"


def _shown(labels: tuple[str, ...], most: int = 10) -> str:
    more = f" and {len(labels) - most} more" if len(labels) > most else ""
    return ", ".join(labels[:most]) + more


def _digest(value: Mapping[str, str]) -> str:
    return sha256(json.dumps(sorted(value.items())).encode()).hexdigest()[:16]
