"""Named byte strings with conditional writes, in a directory or in a bucket: what the state store stands on.

What the strings mean does not belong here (`resources/state.py`).
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from uuid import uuid4

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


@dataclass(frozen=True, slots=True)
class LocalObjects:
    """A directory. Conditional writes hold an flock, so they exclude each other on one machine."""

    root: Path

    def __str__(self) -> str:
        return str(self.root)

    def read(self, path: str) -> tuple[bytes, str] | None:
        """Content and its digest."""
        try:
            content = (self.root / path).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unavailable("reading", self.root / path, error) from error
        return content, _digest(content)

    def write(self, path: str, content: bytes) -> None:
        """By a rename, after the content is on disk."""
        target = self.root / path
        scratch = target.with_name(f".{target.name}.{uuid4().hex}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with scratch.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(target)
        except OSError as error:
            with suppress(OSError):
                scratch.unlink(missing_ok=True)
            raise _unavailable("writing", target, error) from error

    def replace(self, path: str, content: bytes, version: str | None) -> bool:
        """Compare, then rename, under the lock."""
        with self._locked(path):
            current = self.read(path)
            if (current[1] if current else None) != version:
                return False
            self.write(path, content)
            return True

    def list(self, directory: str) -> list[str]:
        """Files that are whole; scratch files begin with a dot."""
        try:
            names = sorted(entry.name for entry in (self.root / directory).iterdir())
        except FileNotFoundError:
            return []
        return [f"{directory}/{name}" for name in names if not name.startswith(".")]

    def delete(self, path: str) -> None:
        """Unlink."""
        (self.root / path).unlink(missing_ok=True)

    def stamps(self) -> dict[str, Stamp]:
        """By size, times and inode."""
        try:
            inside = self.root.resolve(strict=True)
            return dict(self._stamps(self.root, inside))
        except OSError as error:
            raise _unavailable("listing", self.root, error) from error

    def _stamps(self, directory: Path, inside: Path) -> Iterator[tuple[str, Stamp]]:
        with os.scandir(directory) as entries:
            for entry in entries:
                path = Path(entry.path)
                if entry.name.startswith(".") or (entry.is_symlink() and not path.resolve().is_relative_to(inside)):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    with suppress(PermissionError):  # what needs a file in it will say so
                        yield from self._stamps(path, inside)
                elif entry.is_file():
                    with suppress(FileNotFoundError):  # deleted meanwhile
                        stat = entry.stat()
                        version = f"{stat.st_size}-{stat.st_mtime_ns}-{stat.st_ctime_ns}-{stat.st_ino}"
                        yield str(path.relative_to(self.root)), Stamp(version, stat.st_mtime)

    @contextmanager
    def _locked(self, path: str) -> Iterator[None]:
        target = self.root / path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(target.with_name(f".{target.name}.lock"), os.O_CREAT | os.O_RDWR, 0o644)
        except OSError as error:
            raise _unavailable("locking", target, error) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


@dataclass(frozen=True)
class S3Objects:
    """A bucket and prefix, through s3fs; conditional writes by If-Match and If-None-Match."""

    root: str
    """bucket/prefix."""

    def __str__(self) -> str:
        return f"s3://{self.root}"

    @cached_property
    def files(self) -> Any:
        import s3fs

        return s3fs.S3FileSystem(use_listings_cache=False)

    def _call(self, method: str, path: str, **arguments: Any) -> Any:
        from botocore.exceptions import BotoCoreError, ClientError

        bucket, _, prefix = self.root.partition("/")
        key = f"{prefix}/{path}" if prefix else path
        try:
            return self.files.call_s3(method, Bucket=bucket, Key=key, **arguments)
        except (FileNotFoundError, FileExistsError):
            raise
        except (OSError, BotoCoreError, ClientError) as error:
            if _status(error) in (409, 412):
                raise FileExistsError(key) from error
            raise _unavailable(method, f"s3://{bucket}/{key}", error) from error

    def read(self, path: str) -> tuple[bytes, str] | None:
        """Content and ETag."""
        from fsspec.asyn import sync

        try:
            answer = self._call("get_object", path)
        except FileNotFoundError:
            return None
        return sync(self.files.loop, answer["Body"].read), answer["ETag"]

    def write(self, path: str, content: bytes) -> None:
        """One PUT: whole or not at all."""
        try:
            self._call("put_object", path, Body=content)
        except FileNotFoundError as error:
            raise _unavailable("put_object", f"s3://{self.root}/{path}", error) from error

    def replace(self, path: str, content: bytes, version: str | None) -> bool:
        """A conditional PUT."""
        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        try:
            self._call("put_object", path, Body=content, **condition)
        except FileExistsError:
            return False
        except FileNotFoundError as error:
            if version is None:  # no such bucket; with a version the object is gone, which is another version
                raise _unavailable("put_object", f"s3://{self.root}/{path}", error) from error
            return False
        return True

    def list(self, directory: str) -> list[str]:
        """Keys below a prefix."""
        try:
            found = self.files.find(f"{self.root}/{directory}")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _unavailable("listing", f"s3://{self.root}/{directory}", error) from error
        return sorted(path.removeprefix(f"{self.root}/") for path in found)

    def delete(self, path: str) -> None:
        """DELETE succeeds for absent keys too."""
        self._call("delete_object", path)

    def stamps(self) -> dict[str, Stamp]:
        """By ETag and size."""
        try:
            found = self.files.find(self.root, detail=True)
        except OSError as error:
            raise _unavailable("listing", f"s3://{self.root}", error) from error
        named = ((path.removeprefix(f"{self.root}/"), info) for path, info in found.items())
        return {
            name: Stamp(f"{info['ETag']}-{info['size']}", info["LastModified"].timestamp())
            for name, info in named
            if not any(part.startswith(".") or not part for part in name.split("/"))
        }


def _status(error: BaseException) -> int | None:
    cause = error if hasattr(error, "response") else error.__cause__
    response = getattr(cause, "response", None) or {}
    status: int | None = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status


def _unavailable(doing: str, target: object, error: Exception) -> StateUnavailable:
    seen = f"{type(error).__name__}: {error}"
    return StateUnavailable(f"{doing} {target}", seen=seen, do="Check the state store; nothing written before is lost.")


def _digest(content: bytes) -> str:
    from blake3 import blake3

    return blake3(content).hexdigest()


def open_objects(uri: str) -> Objects:
    """The objects at a directory or an s3:// URI. Raises ConfigError for other schemes."""
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
