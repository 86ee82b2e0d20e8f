"""How assets speak to people: tables, progress, and errors as Dagster failures."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import dagster as dg

from assets.tags import tag_process
from resources.workspace import Workspace
from warmers.errors import TransientError, WarmfrontError

if TYPE_CHECKING:
    from warmers.plan import PlanRow

OWNERS = ["team:inference-platform"]
ONCE_MORE = dg.RetryPolicy(max_retries=1, delay=2.0)
"""For a step whose retry does only what is missing; permanent failures say that they are not to be retried."""
INTERRUPTED = "interrupted"
"""Metadata of the failure that an interrupt makes."""
MAY_PASS = "may_pass"  # noqa: S105 - no password
"""Metadata of a failure that a later run may not see."""
MAX_LISTED = 10
"""Reasons in the description of a check."""
MAX_ROWS = 100
"""A table of ten thousand rows is an event of 1.7 MB."""


class Retaining(dg.Config):
    """What a run that shows what nobody needs may do."""

    apply: bool = False
    """False: only show what would be removed."""


@contextmanager
def failures() -> Iterator[None]:
    """Turn a WarmfrontError into a Dagster failure; only a transient one may be retried.

    An interrupt becomes one too: left alone, Dagster takes it for a failure that a retry policy may repeat.
    """
    try:
        yield
    except (KeyboardInterrupt, dg.DagsterExecutionInterruptedError):
        raise dg.Failure(
            description="interrupted; what was finished is recorded",
            metadata={INTERRUPTED: True, MAY_PASS: True},
            allow_retries=False,
        ) from None
    except WarmfrontError as error:
        passing = isinstance(error, TransientError)
        metadata = {MAY_PASS: True} if passing else {}
        raise dg.Failure(description=str(error), metadata=metadata, allow_retries=passing) from error


def telling(workspace: Workspace, context: dg.AssetExecutionContext | dg.AssetCheckExecutionContext) -> Workspace:
    """The workspace, with its progress in the run's log as well; the run says which process executes it."""
    tag_process(context)

    def tell(message: str) -> None:
        context.log.info(message)
        workspace.on_event(message)

    return workspace.telling(tell)


def documents(workspace: Workspace, fleet: str, namespace: str) -> dict[str, dg.MetadataValue[Any]]:
    """Where the latest plan, result and proof of a fleet are, and its ledger: one leads to the others."""
    pointers = {kind: workspace.state.latest(fleet, kind) for kind in ("plan", "warm", "proof")}
    places = {f"{kind}_document": pointer["uri"] for kind, pointer in pointers.items() if pointer}
    places["ledger"] = workspace.state.ledger_uri(namespace)
    return {name: place(uri) for name, uri in places.items()}


def place(uri: str) -> dg.MetadataValue[Any]:
    """Where a document is: an address, or a path of this machine."""
    return dg.MetadataValue.url(uri) if "://" in uri else dg.MetadataValue.path(uri)


def plan_rows(rows: Iterable["PlanRow"]) -> list[dict[str, Any]]:
    """A plan's prefixes as people read them, those that lack most first."""
    return [
        {
            "prefix": row.label,
            "tokens": row.tokens,
            "chunks": row.chunks,
            "present": row.present,
            "missing": row.missing,
            "tail_tokens": row.tail_tokens,
            "store_bytes": row.bytes,
            "same_as": row.same_as or "",
        }
        for row in sorted(rows, key=lambda row: -row.missing)
    ]


def proof_rows(prefixes: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A proof document's prefixes as people read them, those that are not proven first."""
    rows = [
        {
            "prefix": p["label"],
            "verdict": p["verdict"],
            "hit_tokens": p["hit_tokens"],
            "expected_tokens": p["expected_tokens"],
            "ttft_cold_s": round(p["ttft_cold_s"], 3),
            "ttft_warm_s": round(p["ttft_warm_s"], 3),
            "speedup": round(p["speedup"], 1),
            "same_output": "yes" if p["output_unchanged"] else "NO",
            "reason": p["reason"],
        }
        for p in prefixes
    ]
    return sorted(rows, key=lambda row: row["verdict"] == "proven")


def listed(reasons: Sequence[str]) -> str | None:
    """Reasons as a list, the first MAX_LISTED of them; None where there is none."""
    more = [f"and {len(reasons) - MAX_LISTED} more"] if len(reasons) > MAX_LISTED else []
    return "\n".join(f"- {reason}" for reason in [*reasons[:MAX_LISTED], *more]) or None


def table(rows: Iterable[Mapping[str, Any]]) -> dg.MetadataValue[Any]:
    """A table of at most MAX_ROWS rows, in the order given; the word none where there is no row."""
    records = [dg.TableRecord(dict(row)) for _, row in zip(range(MAX_ROWS), rows, strict=False)]
    return dg.MetadataValue.table(records=records) if records else dg.MetadataValue.text("none")
