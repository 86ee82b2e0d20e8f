"""Where weights come from: a directory, a Hugging Face repository, another bucket.

Each satisfies warmers.weights.WeightSource.

What has to be in them does not belong here (`warmers/weights.py`).
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from resources.s3 import error_code, s3_client, s3_failures
from warmers.blocks import BLOCK_BYTES
from warmers.errors import ConfigError, SourceChanged, SourceUnavailable, WeightsError
from warmers.weights import SourceFile

PIECE_BYTES = 4 << 20
TIMEOUT_S = 60.0


def open_source(text: str) -> "DirectorySource | HubSource | BucketSource":
    """The source at a directory, `hf://org/name@revision` or `s3://bucket/prefix`. Raises ConfigError."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        return DirectorySource(Path(text))
    if scheme == "hf":
        name, _, revision = rest.partition("@")
        if name.count("/") == 1 and all(name.split("/")):
            return HubSource(name, revision or "main")
    if scheme == "s3" and rest.strip("/"):
        bucket, _, prefix = rest.partition("/")
        return BucketSource(bucket, prefix.strip("/"))
    raise ConfigError(
        f"opening the weights {text}",
        seen="it is none of the sources that are known",
        do="Give a directory, hf://org/name@revision or s3://bucket/prefix.",
    )


@dataclass(frozen=True)
class DirectorySource:
    """A directory on this machine."""

    root: Path

    def __str__(self) -> str:
        return str(self.root)

    def resolve(self) -> str:
        """A directory has no revision."""
        return ""

    def files(self) -> Sequence[SourceFile]:
        """Files at its top. Raises WeightsError for a link: what it leads to could change without the directory."""
        with self._failures("listing"):
            entries = sorted(os.scandir(self.root), key=lambda entry: entry.name)
            links = [entry.name for entry in entries if entry.is_symlink()]
            found = [SourceFile(e.name, e.stat().st_size, _version(e.stat())) for e in entries if e.is_file()]
        if links:
            raise WeightsError(
                f"listing the weights in {self}",
                seen=f"{links[0]} is a symbolic link ({len(links)} such)",
                do="Name a directory of files: the hub's cache as hf://org/name@revision, others copied with cp -rL.",
            )
        return found

    def read(self, file: SourceFile, start: int = 0) -> Iterator[bytes]:
        """Its bytes; the file has to be the same before and after."""
        with self._failures("reading"), (self.root / file.name).open("rb") as stream:
            stream.seek(start)
            while piece := stream.read(BLOCK_BYTES):  # what is wanted: nobody has to put pieces together
                yield piece
            now = _version(os.fstat(stream.fileno()))
            if now != file.version or _version((self.root / file.name).stat()) != file.version:
                raise _changed(self, file.name)

    @contextmanager
    def _failures(self, doing: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            seen = f"there is no {error.filename}"
            raise SourceUnavailable(f"{doing} the weights in {self}", seen=seen, do="Correct the path.") from None
        except OSError as error:
            raise SourceUnavailable(
                f"{doing} the weights in {self}", seen=str(error), do="Make it readable."
            ) from error


@dataclass(frozen=True)
class HubSource:
    """A repository on the Hugging Face hub, or on whatever HF_ENDPOINT names; HF_TOKEN where it is private."""

    repository: str
    revision: str

    def __str__(self) -> str:
        return f"hf://{self.repository}@{self.revision}"

    @cached_property
    def _info(self) -> Any:
        import httpx2
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

        try:
            hub = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
            return hub.model_info(self.repository, revision=self.revision, files_metadata=True, timeout=TIMEOUT_S)
        except (RepositoryNotFoundError, RevisionNotFoundError) as error:
            raise WeightsError(
                f"looking {self} up on the hub",
                seen=str(error).splitlines()[0],
                do="Correct repository and revision; for a private one put a token into HF_TOKEN.",
            ) from None
        except (HfHubHTTPError, httpx2.HTTPError, OSError) as error:
            raise self._unavailable("looking it up", error) from error

    def resolve(self) -> str:
        """The commit that the revision stands for now."""
        return str(self._info.sha)

    def files(self) -> Sequence[SourceFile]:
        """Of that commit; large ones carry their SHA-256."""
        return [
            SourceFile(s.rfilename, s.size or 0, s.blob_id or "", s.lfs.sha256 if s.lfs else None)
            for s in self._info.siblings
        ]

    def read(self, file: SourceFile, start: int = 0) -> Iterator[bytes]:
        """By HTTP, from the commit."""
        import httpx2
        from huggingface_hub import get_session, get_token, hf_hub_url

        endpoint = os.environ.get("HF_ENDPOINT")
        url = hf_hub_url(self.repository, file.name, revision=self.resolve(), endpoint=endpoint)
        token = get_token()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        if start:
            headers["Range"] = f"bytes={start}-"
        try:
            with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=TIMEOUT_S) as answer:
                answer.raise_for_status()
                if start and answer.status_code != httpx2.codes.PARTIAL_CONTENT:
                    raise SourceUnavailable(
                        f"reading {file.name} of {self}", seen="no range was given", do="Try again."
                    )
                yield from answer.iter_bytes(PIECE_BYTES)
        except httpx2.HTTPError as error:
            raise self._unavailable(f"reading {file.name}", error) from error

    def _unavailable(self, doing: str, error: Exception) -> SourceUnavailable:
        return SourceUnavailable(f"{doing}: {self}", seen=f"{type(error).__name__}: {error}", do="Try again.")


@dataclass(frozen=True)
class BucketSource:
    """A prefix of a bucket, of this or another account; read with the credentials of the environment."""

    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"

    def resolve(self) -> str:
        """A prefix has no revision."""
        return ""

    def files(self) -> Sequence[SourceFile]:
        """Objects below the prefix; ETags tell one content from another, and are no digests."""
        start = f"{self.prefix}/" if self.prefix else ""
        with s3_failures(f"listing {self}"):
            pages = s3_client().get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=start)
            return [
                SourceFile(o["Key"].removeprefix(start), o["Size"], o["ETag"])
                for page in pages
                for o in page.get("Contents", ())
            ]

    def read(self, file: SourceFile, start: int = 0) -> Iterator[bytes]:
        """By a ranged GET of exactly that version."""
        from botocore.exceptions import ClientError

        key = f"{self.prefix}/{file.name}" if self.prefix else file.name
        if start >= file.bytes:
            return
        with s3_failures(f"reading {self}/{file.name}"):
            try:
                answer = s3_client().get_object(
                    Bucket=self.bucket, Key=key, Range=f"bytes={start}-", IfMatch=file.version
                )
            except ClientError as error:
                if error_code(error) in ("PreconditionFailed", "NoSuchKey", "412"):
                    raise _changed(self, file.name) from None
                raise
            with closing(answer["Body"]) as body:
                yield from body.iter_chunks(PIECE_BYTES)


def _version(stat: os.stat_result) -> str:
    return f"{stat.st_size}-{stat.st_mtime_ns}-{stat.st_ctime_ns}-{stat.st_ino}"


def _changed(source: object, name: str) -> SourceChanged:
    return SourceChanged(
        f"reading {name} of {source}", seen="it changed while it was read", do="Stage again when nobody writes to it."
    )
