"""One file into one object: in parts, several at once, going on where a killed run stopped.

Which files are sent, and where to, does not belong here (`resources/stages.py`).
"""

import base64
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from resources.s3 import error_code
from warmers.blocks import BLOCK_BYTES, Passing, joined
from warmers.errors import SourceChanged
from warmers.weights import StagedFile

MAX_PARTS = 9_999
SENDERS = 3
"""Parts of a file under way at once: with one that is being read they are what it takes in memory."""
PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """One part that the bucket has."""

    etag: str
    checksum: str | None
    """CRC-32 in base64, where the server keeps one."""

    def named(self, number: int) -> dict[str, Any]:
        """As the request that completes an upload names it."""
        checksum = {"ChecksumCRC32": self.checksum} if self.checksum else {}
        return {"PartNumber": number, "ETag": self.etag, **checksum}


@dataclass(slots=True)
class Upload:
    """A file on its way to its object."""

    client: Any
    bucket: str
    key: str
    file: StagedFile
    sent: Callable[[int], None]
    """Told the bytes of every part that is there."""
    parts: dict[int, Part] = field(default_factory=dict)

    @property
    def target(self) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": self.key}

    @property
    def part_bytes(self) -> int:
        """A multiple of a block, so that no file has more parts than S3 allows."""
        return BLOCK_BYTES * max(1, ceil(self.file.bytes / MAX_PARTS / BLOCK_BYTES))

    def whole(self, read: Callable[[int], Iterator[bytes]]) -> tuple[str, ...]:
        """In one request, for a small file; its blocks."""
        body = b"".join(read(0))
        passing = Passing(self.file)
        passing.take(body)
        passing.end()
        self.client.put_object(**self.target, Body=body)
        self.sent(len(body))
        return tuple(passing.blocks)

    def in_parts(self, read: Callable[[int], Iterator[bytes]]) -> tuple[str, ...]:
        """In parts; its blocks. What an earlier run sent is kept; the object is read back then.

        Nobody has seen all of it in that case.
        """
        upload_id = self._resume() or self._begin()
        first = next(n for n in range(1, MAX_PARTS + 2) if n not in self.parts)
        try:
            blocks = self._send(upload_id, first, read)
        except SourceChanged:  # these parts are of a file that is no more
            self.client.abort_multipart_upload(**self.target, UploadId=upload_id)
            raise
        alone = self._complete(upload_id)
        return blocks if first == 1 and alone else self._read_back()

    def _begin(self) -> str:
        begun = self.client.create_multipart_upload(**self.target, ChecksumAlgorithm="CRC32")
        return str(begun["UploadId"])

    def _resume(self) -> str | None:
        """The newest unfinished upload of this object, with its whole parts; the key has the digest: same content."""
        from botocore.exceptions import ClientError

        try:
            found = self.client.list_multipart_uploads(Bucket=self.bucket, Prefix=self.key).get("Uploads", ())
        except ClientError as error:
            if error_code(error) == "NotImplemented":  # some servers know no unfinished uploads: a file begins anew
                return None
            raise
        mine = sorted((u for u in found if u["Key"] == self.key), key=lambda u: u["Initiated"])
        if not mine:
            return None
        upload_id = str(mine[-1]["UploadId"])
        pages = self.client.get_paginator("list_parts").paginate(**self.target, UploadId=upload_id)
        for part in (part for page in pages for part in page.get("Parts", ())):
            if part["Size"] == self._size_of(part["PartNumber"]):
                self.parts[part["PartNumber"]] = Part(part["ETag"], part.get("ChecksumCRC32"))
                self.sent(part["Size"])
        return upload_id

    def _size_of(self, number: int) -> int:
        return min(self.part_bytes, self.file.bytes - (number - 1) * self.part_bytes)

    def _send(self, upload_id: str, first: int, read: Callable[[int], Iterator[bytes]]) -> tuple[str, ...]:
        """Send what is missing from part `first` on; the blocks from there."""
        passing = Passing(self.file, (first - 1) * self.part_bytes)
        running = dict[Future[Part], int]()
        with ThreadPoolExecutor(SENDERS, "send") as pool:
            try:
                for number, body in enumerate(joined(read(passing.at), self.part_bytes), first):
                    passing.take(body)
                    if number not in self.parts:
                        running[pool.submit(self._put, upload_id, number, body)] = number
                    self._take_in(running, leave=SENDERS)
                self._take_in(running, leave=0)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        passing.end()
        return tuple(passing.blocks)

    def _put(self, upload_id: str, number: int, body: bytes) -> Part:
        checksum = base64.b64encode(zlib.crc32(body).to_bytes(4)).decode()
        answer = self.client.upload_part(
            **self.target, UploadId=upload_id, PartNumber=number, Body=body, ChecksumCRC32=checksum
        )
        return Part(answer["ETag"], answer.get("ChecksumCRC32"))

    def _take_in(self, running: dict[Future[Part], int], *, leave: int) -> None:
        """Wait for the oldest parts until only so many are under way."""
        while len(running) > leave:
            future = next(iter(running))
            number = running.pop(future)
            self.parts[number] = future.result()
            self.sent(self._size_of(number))

    def _complete(self, upload_id: str) -> bool:
        """Whether the object is of this upload, and not of another stager that was faster with the same parts."""
        from botocore.exceptions import ClientError

        named = [self.parts[number].named(number) for number in sorted(self.parts)]
        try:
            self.client.complete_multipart_upload(**self.target, UploadId=upload_id, MultipartUpload={"Parts": named})
        except ClientError as error:
            if error_code(error) != "NoSuchUpload":
                raise
            return False
        return True

    def _read_back(self) -> tuple[str, ...]:
        passing = Passing(self.file)
        body = self.client.get_object(**self.target)["Body"]
        try:
            with closing(body):
                for block in joined(body.iter_chunks(PIECE_BYTES), BLOCK_BYTES):
                    passing.take(block)
            passing.end()
        except SourceChanged:
            self.client.delete_object(**self.target)
            raise
        return tuple(passing.blocks)
