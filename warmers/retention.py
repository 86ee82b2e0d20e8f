"""What may be removed: decided from who needs it, shown before it is done. Stages of weights, so far.

Listing and removing does not belong here (`resources/stages.py`), nor does knowing who needs what
(`resources/workspace.py`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from warmers.lease import Fence

DAY_S = 86_400.0
UNFINISHED_S = DAY_S
"""Nobody goes on with a stage that nothing was written to for so long."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a model, as a listing shows it."""

    digest: str
    bytes: int
    staged_at: float | None
    """Seconds since the epoch; None: it was never completed."""
    written_at: float
    """When the last of its objects was."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to one stage, and why."""

    digest: str
    bytes: int
    remove: bool
    why: str


@dataclass(frozen=True, slots=True)
class Keep:
    """How much of what nobody needs stays all the same."""

    revisions: int
    """The newest so many."""
    days: float
    """Since it was superseded."""

    @classmethod
    def most_careful(cls, of: Sequence[Self]) -> Self:
        """Of several fleets that serve one model."""
        return cls(max(keep.revisions for keep in of), max(keep.days for keep in of))


class StageRemover(Protocol):
    """Where stages of models are kept."""

    def current(self, model: str) -> Mapping[str, Any] | None:
        """The pointer, with the `digest` that engines load."""

    def remove(self, model: str, digest: str) -> None:
        """Remove a stage: its manifest first, so that nobody takes the rest for complete."""


def decide(stages: Iterable[Stage], needed: Mapping[str, str], keep: Keep, now: float) -> tuple[Decision, ...]:
    """Which stages of a model go: newest first, those that were never completed last.

    A complete one stays where somebody needs it (`needed`: by digest, who), and as long as `keep` says
    of the others. An incomplete one goes when nobody can be writing to it any more.
    """
    stages = tuple(stages)
    complete = [(s.staged_at, s) for s in stages if s.staged_at is not None]
    found, spare, newer_at = list[Decision](), 0, None
    for staged_at, stage in sorted(complete, key=lambda each: each[0], reverse=True):
        superseded_s = now - (staged_at if newer_at is None else newer_at)
        newer_at = staged_at
        spare += stage.digest not in needed
        if stage.digest in needed:
            remove, why = False, needed[stage.digest]
        elif spare <= keep.revisions:
            remove, why = False, f"one of the {keep.revisions} newest that nobody needs"
        else:
            remove, why = superseded_s >= keep.days * DAY_S, f"superseded {_days(superseded_s)} ago"
        found.append(Decision(stage.digest, stage.bytes, remove, why))
    for stage in (s for s in stages if s.staged_at is None):
        idle_s = now - stage.written_at
        remove = idle_s >= UNFINISHED_S and stage.digest not in needed
        found.append(Decision(stage.digest, stage.bytes, remove, f"incomplete, last written to {_days(idle_s)} ago"))
    return tuple(found)


def carry_out(
    decisions: Sequence[Decision], model: str, store: StageRemover, fence: Fence, on_event: Callable[[str], None]
) -> tuple[Decision, ...]:
    """Remove what was decided on, except what engines load by now; what was removed.

    `fence`: of the lease that stagers of the model hold as well, so that none completes a stage under its removal.
    """
    removed = []
    for decision in (decision for decision in decisions if decision.remove):
        fence.check()
        if decision.digest == (store.current(model) or {}).get("digest"):
            continue
        store.remove(model, decision.digest)
        removed.append(decision)
        on_event(f"removed {decision.digest[:16]}, {decision.bytes:,} bytes: {decision.why}")
    return tuple(removed)


def _days(seconds: float) -> str:
    return f"{seconds / DAY_S:.1f} days" if seconds >= DAY_S else f"{seconds / 3600:.1f} hours"
