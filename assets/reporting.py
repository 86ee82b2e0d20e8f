"""How assets speak to people: tables, progress, and errors as Dagster failures."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import dagster as dg

from resources.workspace import Workspace
from warmers.errors import TransientError, WarmfrontError

OWNERS = ["team:inference-platform"]
ONCE_MORE = dg.RetryPolicy(max_retries=1, delay=2.0)
"""For a step whose retry does only what is missing; permanent failures say that they are not to be retried."""
INTERRUPTED = "interrupted"
"""Metadata of the failure that an interrupt makes."""
MAX_ROWS = 100
"""A table of ten thousand rows is an event of 1.7 MB."""


@contextmanager
def failures() -> Iterator[None]:
    """Turn a WarmfrontError into a Dagster failure; only a transient one may be retried.

    An interrupt becomes one too: left alone, Dagster takes it for a failure that a retry policy may repeat.
    """
    try:
        yield
    except (KeyboardInterrupt, dg.DagsterExecutionInterruptedError):
        raise dg.Failure(
            description="interrupted; what was finished is recorded", metadata={INTERRUPTED: True}, allow_retries=False
        ) from None
    except WarmfrontError as error:
        raise dg.Failure(description=str(error), allow_retries=isinstance(error, TransientError)) from error


def telling(workspace: Workspace, context: dg.AssetExecutionContext | dg.AssetCheckExecutionContext) -> Workspace:
    """The workspace, with its progress in the run's log as well."""

    def tell(message: str) -> None:
        context.log.info(message)
        workspace.on_event(message)

    return workspace.telling(tell)


def table(rows: Iterable[Mapping[str, Any]]) -> dg.TableMetadataValue:
    """A table of at most MAX_ROWS rows, in the order given."""
    records = [dg.TableRecord(dict(row)) for _, row in zip(range(MAX_ROWS), rows, strict=False)]
    if not records:
        schema = dg.TableSchema(columns=[dg.TableColumn("nothing")])
        return dg.MetadataValue.table(records=[], schema=schema)
    return dg.MetadataValue.table(records=records)
