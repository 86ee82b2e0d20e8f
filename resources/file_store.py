"""A shared file system as L2: Curvine, FSx for Lustre, or whatever else every replica has mounted.

LMCache's `fs` adapter (0.5.6) writes each chunk to `<name>.tmp` and renames it to `<name>.data`, so a file that bears
its last name is whole, unless the mount has no rename. It never overwrites one that is there, whatever its size.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from warmers.errors import ConfigError, StoreUnavailable
from warmers.presence import StoreUsage

LOOKS = 16
"""Files that are asked for at once: each costs a round trip to a metadata server."""
CHUNK = ".data"
BATCH = 1000
"""Files that one thread asks for in a row."""
T = TypeVar("T")


@dataclass(frozen=True)
class FileStore:
    """Namespaces as directories below one; a key is `<namespace>/<file>`. Satisfies warmers.presence.KVStore."""

    directory: Path
    ttl_s: int | None = None
    """For which a file lives that nobody reads or writes; None: for ever."""

    def sizes(self, keys: Sequence[str]) -> NDArray[np.int64]:
        """Bytes of each chunk's file."""
        return np.array(self._each("asking for sizes", keys, lambda path: _looked(path, lambda s: s.st_size)), np.int64)

    def lives(self, keys: Sequence[str]) -> NDArray[np.float64]:
        """What is left of `ttl_s` since each file was last read, written or extended, as far as the mount notes it."""
        now, ttl_s = time.time(), float("inf") if self.ttl_s is None else self.ttl_s

        def left(stat: os.stat_result) -> float:
            return max(0.0, max(stat.st_atime, stat.st_mtime) + ttl_s - now)

        return np.array(self._each("asking for the life", keys, lambda path: _looked(path, left)), np.float64)

    def extend(self, keys: Sequence[str], seconds: NDArray[np.int64]) -> None:
        """Touch: all files live equally long."""
        self._each("extending", keys, _touch)

    def delete(self, keys: Sequence[str]) -> None:
        """Unlink, and what an interrupted write left beside it."""
        self._each("deleting", keys, _delete)

    def names(self, start: str) -> Iterator[list[str]]:
        """Files of one namespace's directory; those of interrupted writes are none."""
        namespace, _, head = start.partition("/")
        directory = self.directory / namespace
        with _failures(f"listing {directory}"), suppress(FileNotFoundError), os.scandir(directory) as entries:
            found = (f"{namespace}/{e.name}" for e in entries if e.name.startswith(head) and e.name.endswith(CHUNK))
            while batch := list(islice(found, BATCH)):
                yield batch

    def usage(self) -> StoreUsage:
        """Of the whole mount, whosever the files are."""
        with _failures(f"asking for the free space of {self.directory}"):
            mount = os.statvfs(self.directory)
        used = (mount.f_blocks - mount.f_bfree) * mount.f_frsize
        return StoreUsage(used, used + mount.f_bavail * mount.f_frsize)

    def require_writable(self, start: str) -> None:
        """Make the namespace's directory, and a file in it that is renamed: as LMCache writes."""
        probe = self.directory / start / f".warmfront-{uuid4().hex}"
        try:
            probe.parent.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"")
            probe.replace(probe.with_suffix(".renamed"))
            probe.with_suffix(".renamed").unlink()
        except OSError as error:
            with suppress(OSError):
                probe.unlink(missing_ok=True)
            raise ConfigError(
                f"opening the L2 directory {self.directory}",
                seen=f"{error.strerror}: a file cannot be written and renamed there",
                do="Mount a shared file system with rename, read and write (Mountpoint for S3 has none).",
            ) from error

    def _each(self, doing: str, keys: Sequence[str], act: Callable[[str], T]) -> list[T]:
        paths = [f"{self.directory}/{key}" for key in keys]

        def batch(start: int) -> list[T]:
            return [act(path) for path in paths[start : start + BATCH]]

        with _failures(f"{doing} of {len(keys)} files in {self.directory}"):
            self.directory.stat()  # a mount that is gone is no empty one
            with ThreadPoolExecutor(LOOKS, "files") as pool:
                return list(chain.from_iterable(pool.map(batch, range(0, len(paths), BATCH))))


@contextmanager
def _failures(doing: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreUnavailable(
            doing,
            seen=f"{type(error).__name__}: {error.strerror}",
            do="Check that it is mounted, and how; the next run goes on where this one stopped.",
        ) from error


def _looked(path: str, see: Callable[[os.stat_result], T]) -> T | int:
    try:
        return see(os.stat(path))
    except FileNotFoundError:
        return -1


def _touch(path: str) -> None:
    with suppress(FileNotFoundError):
        os.utime(path)


def _delete(path: str) -> None:
    for name in (f"{path.removesuffix(CHUNK)}.tmp", path):
        with suppress(FileNotFoundError):
            os.unlink(name)
