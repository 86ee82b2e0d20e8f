"""A shared file system as L2: Curvine, FSx for Lustre, or whatever else every replica has mounted.

LMCache's `fs` adapter (0.5.6) writes each chunk to `<name>.tmp` and renames it to `<name>.data`, so a file that bears
its last name is whole, unless the mount has no rename. It never overwrites one that is there, whatever its size.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from warmers.errors import ConfigError, StoreUnavailable

LOOKS = 16
"""Files that are asked for at once: each costs a round trip to a metadata server."""
BATCH = 1000
"""Files that one thread asks for in a row."""


@dataclass(frozen=True)
class FileStore:
    """One namespace's directory. Satisfies warmers.presence.KVStore."""

    directory: Path

    def sizes(self, keys: Sequence[str]) -> NDArray[np.int64]:
        """Bytes of each chunk's file, -1 where there is none."""
        return np.array(self._each("asking for sizes", keys, _size), np.int64)

    def delete(self, keys: Sequence[str]) -> int:
        """Delete chunks, and what an interrupted write left of them; how many there were."""
        return sum(self._each("deleting", keys, _delete))

    def require_rename(self) -> None:
        """Make the directory, and a file in it that is renamed: as LMCache writes. Raises ConfigError."""
        probe = self.directory / f".warmfront-{uuid4().hex}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"")
            probe.replace(probe.with_suffix(".renamed"))
            probe.with_suffix(".renamed").unlink()
        except OSError as error:
            probe.unlink(missing_ok=True)
            raise ConfigError(
                f"opening the L2 directory {self.directory}",
                seen=f"{error.strerror}: a file cannot be written and renamed there",
                do="Mount a shared file system with rename, read and write (Mountpoint for S3 has none).",
            ) from error

    def _each(self, doing: str, keys: Sequence[str], look: Callable[[str], int]) -> list[int]:
        paths = [str(self.directory / key) for key in keys]

        def batch(start: int) -> list[int]:
            return [look(path) for path in paths[start : start + BATCH]]

        try:
            if not self.directory.is_dir():
                self.directory.parent.stat()  # a namespace that nobody has written to yet, or a mount that is gone
            with ThreadPoolExecutor(LOOKS, "files") as pool:
                return [answer for answers in pool.map(batch, range(0, len(paths), BATCH)) for answer in answers]
        except OSError as error:
            raise StoreUnavailable(
                f"{doing} of {len(keys)} files in {self.directory}",
                seen=f"{type(error).__name__}: {error.strerror}",
                do="Check that it is mounted, and how; the next run goes on where this one stopped.",
            ) from error


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return -1


def _delete(path: str) -> int:
    for name, counts in ((f"{path.removesuffix('.data')}.tmp", 0), (path, 1)):
        try:
            os.unlink(name)
        except FileNotFoundError:
            continue
        if counts:
            return 1
    return 0
