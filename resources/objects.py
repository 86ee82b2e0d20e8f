"""Named byte strings with conditional writes: what the state store and template sources stand on.

What the strings mean does not belong here (`resources/state.py`, `resources/prompts.py`).
"""

from pathlib import Path
from typing import NamedTuple, Protocol

from warmers.errors import ConfigError, StateUnavailable


class Objects(Protocol):
    """Named byte strings with conditional writes."""

    def read(self, path: str) -> tuple[bytes, str] | None:
        """Content and version, or None."""

    def write(self, path: str, content: bytes) -> None:
        """Write whole or not at all."""

    def replace(self, path: str, content: bytes, version: str | None) -> bool:
        """Write if the version is still this one (None: if there is none); whether it was."""

    def list(self, directory: str) -> list[str]:
        """Paths of the files in a directory, sorted; empty where there is none."""

    def delete(self, path: str) -> None:
        """Delete a file, if it is there."""

    def stamps(self) -> dict[str, "Stamp"]:
        """Every file below the root, hidden ones and links that lead out of it apart."""


class Stamp(NamedTuple):
    """What changes with a file's content, without reading it."""

    version: str
    modified_at: float
    """Seconds since the epoch."""


def open_objects(uri: str) -> Objects:
    """The objects at a directory or an s3:// URI. Raises ConfigError for other schemes."""
    from resources.local_objects import LocalObjects
    from resources.s3_objects import S3Objects

    scheme, separator, rest = uri.partition("://")
    if not separator or scheme == "file":
        return LocalObjects(Path(rest if separator else uri))
    if scheme == "s3":
        return S3Objects(rest.rstrip("/"))
    raise ConfigError(
        f"opening the state store {uri}",
        seen=f"{scheme}:// has no conditional write here",
        do="Use a directory or s3://bucket/prefix.",
    )


def unavailable(doing: str, target: object, error: Exception) -> StateUnavailable:
    """The error for what could not be done to an object."""
    seen = f"{type(error).__name__}: {error}"
    return StateUnavailable(f"{doing} {target}", seen=seen, do="Check the state store; nothing written before is lost.")
