"""The state store: one tree at an fsspec URI, of immutable documents and of pointers moved by conditional write.

    fleets/<fleet>/prefixes.json, plan.json, warm.json, proof.json   pointers to the latest
    fleets/<fleet>/{prefixes,plan,warm,proof}/<time>-<random>.*      what they point to
    namespaces/<namespace>/lease.json
    namespaces/<namespace>/ledger/<time>-<random>.parquet            segments, oldest first

Deciding what to write does not belong here.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from uuid import uuid4

import numpy as np

from warmers.errors import ConfigError, StateUnavailable
from warmers.ledger import Rows, merge
from warmers.prefixes import Failed, Prefix, PrefixSet, Variation

if TYPE_CHECKING:
    import pandas as pd

COMPACT_AT = 32
"""Ledger segments beyond which they are rewritten as one."""
PREFIX_FORMAT = 1
"""Of a stored prefix set; one of another format is rendered again."""
KEEP = 20
"""Immutable documents of a kind kept behind a pointer."""


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


@dataclass(frozen=True, slots=True)
class LocalObjects:
    """A directory. Conditional writes hold an flock, so they exclude each other on one machine."""

    root: Path

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


def open_state(uri: str) -> "StateStore":
    """The state store at a directory or an s3:// URI. Raises ConfigError for other schemes."""
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme == "file":
        return StateStore(LocalObjects(Path(rest if separator else uri)), uri)
    if scheme == "s3":
        return StateStore(S3Objects(rest.rstrip("/")), uri)
    raise ConfigError(
        f"opening the state store {uri}",
        seen=f"{scheme}:// has no conditional write here",
        do="Use a directory or s3://bucket/prefix.",
    )


@dataclass(frozen=True, slots=True)
class StateStore:
    """Typed access to the tree."""

    objects: Objects
    uri: str

    def point(self, fleet: str, kind: str, content: bytes, suffix: str, summary: Mapping[str, Any]) -> str:
        """Write an immutable document and move the fleet's pointer of that kind to it; its URI."""
        directory = f"fleets/{fleet}/{kind}"
        path = f"{directory}/{_stamp()}{suffix}"
        self.objects.write(path, content)
        pointer = json.dumps({"uri": f"{self.uri.rstrip('/')}/{path}", "path": path, **summary}, indent=2).encode()
        name = f"fleets/{fleet}/{kind}.json"
        while not self.objects.replace(name, pointer, _version(self.objects.read(name))):
            continue
        for old in self.objects.list(directory)[:-KEEP]:
            self.objects.delete(old)
        return f"{self.uri.rstrip('/')}/{path}"

    def latest(self, fleet: str, kind: str) -> dict[str, Any] | None:
        """The fleet's pointer of a kind: `uri`, `path` and a summary."""
        found = self.objects.read(f"fleets/{fleet}/{kind}.json")
        return json.loads(found[0]) if found else None

    def document(self, fleet: str, kind: str) -> dict[str, Any] | None:
        """The JSON document that the pointer names."""
        pointer = self.latest(fleet, kind)
        found = self.objects.read(pointer["path"]) if pointer else None
        return json.loads(found[0]) if found else None

    def save_prefixes(self, fleet: str, prefixes: PrefixSet, summary: Mapping[str, Any]) -> str:
        """Write a prefix set and make it the latest; its URI."""
        content = _prefixes_to_parquet(prefixes)
        return self.point(fleet, "prefixes", content, ".parquet", {**summary, "format": PREFIX_FORMAT})

    def prefixes(self, fleet: str) -> PrefixSet | None:
        """The latest prefix set."""
        pointer = self.latest(fleet, "prefixes")
        if pointer is None or pointer.get("format") != PREFIX_FORMAT:
            return None
        found = self.objects.read(pointer["path"])
        return _prefixes_from_parquet(found[0]) if found else None

    def forget(self, fleet: str, kind: str) -> None:
        """Drop the fleet's pointer of a kind."""
        self.objects.delete(f"fleets/{fleet}/{kind}.json")

    def journal(self, namespace: str) -> "LedgerFiles":
        """The ledger of a namespace."""
        return LedgerFiles(self.objects, f"namespaces/{namespace}/ledger")


@dataclass(frozen=True, slots=True)
class LedgerFiles:
    """A ledger as parquet segments. Satisfies warmers.ledger.Journal; written under the namespace's lease."""

    objects: Objects
    directory: str

    def record(self, rows: Rows) -> None:
        """Append a segment; past COMPACT_AT of them, rewrite all as one."""
        segments = self.objects.list(self.directory)
        if len(segments) >= COMPACT_AT:
            rows = merge([*self._read(segments), rows])
        self.objects.write(f"{self.directory}/{_stamp()}.parquet", _to_parquet(_frame(rows)))
        if len(segments) >= COMPACT_AT:
            for segment in segments:
                self.objects.delete(segment)

    def rows(self) -> Rows:
        """Every chunk's latest row."""
        return merge(self._read(self.objects.list(self.directory)))

    def _read(self, segments: list[str]) -> list[Rows]:
        found = (self.objects.read(segment) for segment in segments)
        return [_rows(_from_parquet(content[0])) for content in found if content]


def _stamp() -> str:
    """Sorts by time: nanoseconds since the epoch, then something random."""
    return f"{time.time_ns():020d}-{uuid4().hex[:8]}"


def _version(found: tuple[bytes, str] | None) -> str | None:
    return found[1] if found else None


def _to_parquet(frame: "pd.DataFrame") -> bytes:
    import io

    buffer = io.BytesIO()
    frame.to_parquet(buffer, index=False)
    return buffer.getvalue()


def _from_parquet(content: bytes) -> "pd.DataFrame":
    import io

    import pandas as pd

    return pd.read_parquet(io.BytesIO(content))


def _frame(rows: Rows) -> "pd.DataFrame":
    import pandas as pd

    return pd.DataFrame({f.name: getattr(rows, f.name) for f in fields(Rows)})


def _rows(frame: "pd.DataFrame") -> Rows:
    kinds = {f.name: getattr(Rows.empty(), f.name).dtype.kind for f in fields(Rows)}
    return Rows(*(frame[name].to_numpy(np.str_ if kind == "U" else None) for name, kind in kinds.items()))


def _prefixes_to_parquet(prefixes: PrefixSet) -> bytes:
    import pandas as pd

    rows = [
        {
            "template": p.template,
            "context": p.context,
            "digest": p.digest,
            "rendered": p.rendered,
            "shared": p.shared,
            "chunk_tokens": p.chunk_tokens,
            "salt": p.salt,
            "adapter": p.adapter,
            "weight": p.weight,
            "variations": json.dumps([asdict(v) for v in p.variations]),
            "failed": None,
        }
        for p in prefixes.found
    ]
    rows += [{"template": f.template, "failed": f.reason} for f in prefixes.failed]
    return _to_parquet(pd.DataFrame(rows, columns=None if rows else ["template", "failed"]))


def _prefixes_from_parquet(content: bytes) -> PrefixSet:
    frame = _from_parquet(content)
    frame = frame.astype(object).where(frame.notna(), None)
    found, failed = [], []
    for row in frame.to_dict("records"):
        reason = row.pop("failed")
        if reason is not None:
            failed.append(Failed(row["template"], reason))
            continue
        variations = tuple(
            Variation(v["where"], tuple(v["values"]), v["lost_chars"]) for v in json.loads(row.pop("variations"))
        )
        row |= {
            "shared": int(row["shared"]),
            "chunk_tokens": int(row["chunk_tokens"]),
            "rendered": np.asarray(row["rendered"], np.uint32),
        }
        found.append(Prefix(**row, variations=variations))
    return PrefixSet(tuple(found), tuple(failed))
