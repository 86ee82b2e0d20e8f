"""Stages of models in a bucket. Satisfies warmers.stage.StageStore.

models/<model>/<digest>/<file>          with its SHA-256 in the object's metadata
models/<model>/<digest>/manifest.json   written last
models/<model>/current.json             points to a digest, moved by conditional write
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from resources.s3 import error_code, s3_client, s3_failures
from resources.uploads import PIECE_BYTES, Upload
from warmers.blocks import BLOCK_BYTES
from warmers.errors import ConfigError, NotStaged, WeightsError
from warmers.retention import UNFINISHED_S, Stage
from warmers.weights import Manifest, StagedFile, stage_path

MANIFEST = "manifest.json"
NOTES = ".sent"
DIGEST = re.compile("[0-9a-f]{64}")


class _Listed(NamedTuple):
    """One object, as a listing shows it."""

    bytes: int
    etag: str
    modified_at: float
    """Seconds since the epoch."""


@dataclass(frozen=True)
class BucketStages:
    """Stages below one prefix of a bucket."""

    bucket: str
    prefix: str
    endpoint: str | None = None
    """Of the embedded stack's server; None: S3, as the environment says."""

    @cached_property
    def client(self) -> Any:
        """Of boto3."""
        return s3_client(self.endpoint)

    @classmethod
    def at(cls, uri: str, endpoint: str | None = None) -> "BucketStages":
        """At `s3://bucket/prefix`. Raises ConfigError."""
        scheme, _, rest = uri.partition("://")
        bucket, _, prefix = rest.partition("/")
        if scheme != "s3" or not bucket:
            raise ConfigError(f"opening the stages at {uri}", seen="it is no s3:// URI", do="Give s3://bucket/prefix.")
        return cls(bucket, prefix.strip("/"), endpoint)

    def make_bucket(self) -> None:
        """Make the bucket, unless it is there: the embedded stack's, nobody else's."""
        with s3_failures(f"making s3://{self.bucket}"):
            if self.bucket not in {bucket["Name"] for bucket in self.client.list_buckets().get("Buckets", ())}:
                self.client.create_bucket(Bucket=self.bucket)

    def uri(self, model: str, digest: str) -> str:
        """Where engines load a stage from."""
        return f"s3://{self.bucket}/{self.prefix and self.prefix + '/'}{stage_path(model, digest)}"

    def _key(self, *parts: str) -> str:
        return "/".join((*filter(None, [self.prefix]), "models", *parts))

    def current(self, model: str) -> dict[str, Any] | None:
        """The pointer: digest, and when it was staged."""
        found = self._get(self._key(model, "current.json"))
        return json.loads(found[0]) if found else None

    def manifest(self, model: str, digest: str) -> Manifest | None:
        """Of a complete stage."""
        found = self._get(self._key(model, digest, MANIFEST))
        return Manifest.from_json(found[0]) if found else None

    def current_manifest(self, model: str) -> Manifest:
        """Of the stage that engines load. Raises NotStaged."""
        current = self.current(model)
        manifest = self.manifest(model, current["digest"]) if current else None
        if manifest is None:
            raise NotStaged(
                f"looking for the weights of {model}", seen="nobody has staged them yet", do="Run warmfront stage."
            )
        return manifest

    def manifests(self, model: str) -> Sequence[Manifest]:
        """Of every complete stage."""
        found = list[Manifest | None]()
        for digest in self.digests(model):
            with suppress(WeightsError):  # of another version of warmfront
                found.append(self.manifest(model, digest))
        return [manifest for manifest in found if manifest is not None]

    def digests(self, model: str) -> list[str]:
        """Of every stage, complete or not."""
        start = self._key(model, "")
        with s3_failures(f"listing s3://{self.bucket}/{start}"):
            pages = self.client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=start, Delimiter="/"
            )
            folders = (
                p["Prefix"].removeprefix(start).rstrip("/") for page in pages for p in page.get("CommonPrefixes", ())
            )
            return [folder for folder in folders if DIGEST.fullmatch(folder)]

    def sizes(self, model: str, digest: str) -> dict[str, int]:
        """Bytes of a stage's objects by file name, the manifest apart."""
        return {name: found.bytes for name, found in self._listed(model, digest).items() if name != MANIFEST}

    def present(self, model: str, digest: str) -> Mapping[str, tuple[int, str]]:
        """Bytes and SHA-256 of a stage's objects, complete or not, by file name.

        The SHA-256 is that of our own note, as long as the object has the ETag that it had then.
        """
        listed, found = self._listed(model, digest), {}
        for name in self._listed(model, NOTES, digest):
            note = self._get(self._key(model, NOTES, digest, name))
            sent, there = json.loads(note[0]) if note else {}, listed.get(name)
            if there is not None and (there.bytes, there.etag) == (sent.get("bytes"), sent.get("etag")):
                found[name] = (sent["bytes"], sent["sha256"])
        return found

    def _listed(self, *folder: str) -> dict[str, "_Listed"]:
        """The objects below a folder, by name."""
        start = self._key(*folder, "")
        with s3_failures(f"listing s3://{self.bucket}/{start}"):
            pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=start)
            found = (o for page in pages for o in page.get("Contents", ()))
            return {
                o["Key"].removeprefix(start): _Listed(o["Size"], o["ETag"], o["LastModified"].timestamp())
                for o in found
            }

    def _note(self, model: str, digest: str, file: StagedFile) -> None:
        """Write down that a file is in its place; not every server keeps metadata with the object itself."""
        key = self._key(model, digest, file.name)
        etag = self.client.head_object(Bucket=self.bucket, Key=key)["ETag"]
        note = json.dumps({"bytes": file.bytes, "etag": etag, "sha256": file.sha256}).encode()
        self.client.put_object(Bucket=self.bucket, Key=self._key(model, NOTES, digest, file.name), Body=note)

    def read(self, model: str, digest: str, name: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Bytes of one object, in pieces; `end` is behind the last."""
        from botocore.exceptions import ClientError

        key = self._key(model, digest, name)
        span = f"bytes={start}-{'' if end is None else end - 1}"
        with s3_failures(f"reading s3://{self.bucket}/{key}"):
            try:
                body = self.client.get_object(Bucket=self.bucket, Key=key, Range=span)["Body"]
            except ClientError as error:
                if error_code(error) == "InvalidRange":  # an empty object has no first byte
                    return
                raise
            with closing(body):
                yield from body.iter_chunks(PIECE_BYTES)

    def send(
        self,
        model: str,
        digest: str,
        file: StagedFile,
        read: Callable[[int], Iterator[bytes]],
        sent: Callable[[int], None],
    ) -> tuple[str, ...]:
        """Write one file from its bytes; its blocks. Parts that are there already are not sent again.

        Raises SourceChanged where the bytes are not those of `file`; the object does not appear then.
        """
        key = self._key(model, digest, file.name)
        upload = Upload(self.client, self.bucket, key, file, sent)
        with s3_failures(f"sending {file.name} to s3://{self.bucket}/{key}"):
            blocks = upload.whole(read) if file.bytes <= BLOCK_BYTES else upload.in_parts(read)
            self._note(model, digest, file)
        return blocks

    def copy(self, model: str, digest: str, file: StagedFile, model_digest: str) -> None:
        """Copy one file from another stage of the model, within the store."""
        source = {"Bucket": self.bucket, "Key": self._key(model, model_digest, file.name)}
        key = self._key(model, digest, file.name)
        with s3_failures(f"copying {file.name} to s3://{self.bucket}/{key}"):
            self.client.copy(source, self.bucket, key)
            self._note(model, digest, file)

    def publish(self, manifest: Manifest, now: float) -> str:
        """Write the manifest, then move the model's pointer to it; the URI of the stage."""
        key = self._key(manifest.model, manifest.digest, MANIFEST)
        with s3_failures(f"writing s3://{self.bucket}/{key}"):
            self.client.put_object(Bucket=self.bucket, Key=key, Body=manifest.to_json())
        self._point(manifest, now)
        return self.uri(manifest.model, manifest.digest)

    def _point(self, manifest: Manifest, now: float) -> None:
        """Move the pointer, unless it is there; what another stager wrote in between is read before it is replaced."""
        from botocore.exceptions import ClientError

        key = self._key(manifest.model, "current.json")
        body = json.dumps({"digest": manifest.digest, "source": manifest.source, "staged_at": now}).encode()
        with s3_failures(f"moving the pointer s3://{self.bucket}/{key}"):
            while True:
                found = self._get(key)
                if found and json.loads(found[0])["digest"] == manifest.digest:
                    return
                condition = {"IfMatch": found[1]} if found else {"IfNoneMatch": "*"}
                try:
                    self.client.put_object(Bucket=self.bucket, Key=key, Body=body, **condition)
                except ClientError as error:
                    if error_code(error) not in ("PreconditionFailed", "ConditionalRequestConflict", "NoSuchKey"):
                        raise
                else:
                    return

    def staged(self, model: str) -> list[Stage]:
        """Every stage with something left of it, complete or not."""
        found = dict[str, list[tuple[str, int, float]]]()
        for key, entry in self._listed(model).items():
            folder, _, name = key.removeprefix(f"{NOTES}/").partition("/")
            if DIGEST.fullmatch(folder):
                noted = key.startswith(f"{NOTES}/")
                found.setdefault(folder, []).append((NOTES if noted else name, entry.bytes, entry.modified_at))
        return [
            Stage(
                digest,
                sum(size for _, size, _ in objects),
                next((at for name, _, at in objects if name == MANIFEST), None),
                max(at for _, _, at in objects),
            )
            for digest, objects in found.items()
        ]

    def remove(self, model: str, digest: str) -> None:
        """Remove a stage, its manifest first: from then on nobody takes it for complete."""
        stage = [self._key(model, digest, name) for name in (MANIFEST, *self.sizes(model, digest))]
        notes = [self._key(model, NOTES, digest, name) for name in self._listed(model, NOTES, digest)]
        with s3_failures(f"removing {self.uri(model, digest)}"):
            for key in (*stage, *notes):
                self.client.delete_object(Bucket=self.bucket, Key=key)

    def distrust(self, model: str, digest: str, names: Sequence[str]) -> None:
        """Have files sent anew by the next run, whatever is there."""
        with s3_failures(f"forgetting what was sent to {self.uri(model, digest)}"):
            for name in names:
                self.client.delete_object(Bucket=self.bucket, Key=self._key(model, NOTES, digest, name))

    def abort_stale(self, model: str, now: float) -> list[str]:
        """Abort uploads that nobody goes on with; their keys. None where the server lists no uploads."""
        from botocore.exceptions import ClientError

        start, stale = self._key(model, ""), []
        with s3_failures(f"listing the uploads below s3://{self.bucket}/{start}"):
            try:
                pages = self.client.get_paginator("list_multipart_uploads").paginate(Bucket=self.bucket, Prefix=start)
                uploads = [upload for page in pages for upload in page.get("Uploads", ())]
            except ClientError as error:
                if error_code(error) == "NotImplemented":
                    return []
                raise
            for upload in uploads:
                if now - upload["Initiated"].timestamp() > UNFINISHED_S:
                    named = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
                    self.client.abort_multipart_upload(Bucket=self.bucket, **named)
                    stale.append(upload["Key"])
        return stale

    def _get(self, key: str) -> tuple[bytes, str] | None:
        """Content and ETag of a small object."""
        from botocore.exceptions import ClientError

        with s3_failures(f"reading s3://{self.bucket}/{key}"):
            try:
                answer = self.client.get_object(Bucket=self.bucket, Key=key)
            except ClientError as error:
                if error_code(error) == "NoSuchKey":
                    return None
                raise
            return answer["Body"].read(), answer["ETag"]
