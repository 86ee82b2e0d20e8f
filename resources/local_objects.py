"""Objects in a directory."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from resources.objects import Stamp, unavailable


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
            raise unavailable("reading", self.root / path, error) from error
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
            raise unavailable("writing", target, error) from error

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
        except OSError as error:
            raise unavailable("listing", self.root / directory, error) from error
        return [f"{directory}/{name}" for name in names if not name.startswith(".")]

    def delete(self, path: str) -> None:
        """Unlink."""
        try:
            (self.root / path).unlink(missing_ok=True)
        except OSError as error:
            raise unavailable("deleting", self.root / path, error) from error

    def stamps(self) -> dict[str, Stamp]:
        """By size, times and inode."""
        try:
            return dict(self._stamps(self.root, self.root.resolve(strict=True)))
        except (OSError, RuntimeError) as error:
            raise unavailable("listing", self.root, error) from error

    def _stamps(self, directory: Path, inside: Path) -> Iterator[tuple[str, Stamp]]:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                path = Path(entry.path)
                # Deleted meanwhile, or not ours to read: what needs a file in it will say so.
                with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                    if entry.is_dir(follow_symlinks=False):
                        yield from self._stamps(path, inside)
                    elif _leads_to_a_file(entry, inside):
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
            raise unavailable("locking", target, error) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def _digest(content: bytes) -> str:
    from blake3 import blake3

    return blake3(content).hexdigest()


def _leads_to_a_file(entry: os.DirEntry[str], inside: Path) -> bool:
    """Whether it is a file, or a link to one below `inside`; a link that leads in a circle is none."""
    try:
        return entry.is_file() and (not entry.is_symlink() or Path(entry.path).resolve().is_relative_to(inside))
    except (OSError, RuntimeError):  # Python 3.11 raises RuntimeError for a circle
        return False
