"""Whether a stage still is what its manifest says: existence and sizes, samples of its blocks, or every block."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random
from typing import Literal, NamedTuple, Protocol

from blake3 import blake3

from warmers.blocks import BLOCK_BYTES
from warmers.errors import WeightsError
from warmers.safetensors import LENGTH_BYTES, header_bytes
from warmers.weights import WEIGHTS, Manifest, StagedFile, damage

Depth = Literal["sizes", "sampled", "full"]
READERS = 4
"""Requests under way at once."""
SPAN_BLOCKS = 8
"""Blocks that a full verification reads by one request: long enough to cost little, short enough to read one file in
parallel."""


class StageReader(Protocol):
    """A store of stages, as far as verifying needs it."""

    def sizes(self, model: str, digest: str) -> dict[str, int]:
        """Bytes of a stage's objects by file name, the manifest apart."""

    def read(self, model: str, digest: str, name: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Bytes of one object, in pieces; `end` is behind the last."""


class Streamer(Protocol):
    """What engines load a stage with."""

    def digests(self, files: Sequence[tuple[str, bytes]]) -> Sequence[str]:
        """SHA-256 of files, as the tensors that it gives make it.

        `files`: URI, and the bytes up to the first tensor. Raises BucketUnavailable.
        """


@dataclass(frozen=True, slots=True)
class Verified:
    """What a verification saw."""

    findings: tuple[str, ...]
    damaged: tuple[str, ...]
    """Files whose bytes are others than were staged."""
    read_bytes: int


def verify(
    manifest: Manifest, store: StageReader, depth: Depth, *, samples: int = 16, random: Random | None = None
) -> Verified:
    """Compare a stage with its manifest.

    `sampled` reads `samples` blocks, chosen anew each time, of files that are there; `full` reads everything. Memory is
    bounded by pieces of a block, whatever the files' sizes. Raises BucketUnavailable.
    """
    sizes = store.sizes(manifest.model, manifest.digest)
    found = damage(manifest, sizes)
    whole = [file for file in manifest.files if sizes.get(file.name) == file.bytes]
    spans: list[_Span] = []
    if depth == "full":
        spans = [_Span(file, at, SPAN_BLOCKS) for file in whole for at in range(0, len(file.blocks), SPAN_BLOCKS)]
    elif depth == "sampled":
        blocks = [_Span(file, number, 1) for file in whole for number in range(len(file.blocks))]
        spans = (random or Random()).sample(blocks, min(samples, len(blocks)))  # noqa: S311 - a sample, no secret
    with ThreadPoolExecutor(READERS, "verify") as pool:
        wrong = [at for seen in pool.map(lambda span: _look(store, manifest, span), spans) for at in seen]
    names = dict.fromkeys(file.name for file, _ in wrong)
    said = (f"{name} has other bytes than were staged{_places(wrong, name)}" for name in names)
    return Verified((*found, *said), tuple(sorted(names)), sum(span.end - span.start for span in spans))


def verify_streamed(
    manifest: Manifest, uri: str, store: StageReader, streamer: Streamer, depth: Depth
) -> tuple[str, ...]:
    """Findings of loading a stage as an engine does: every shard for `full`, the smallest for `sampled`.

    `uri`: of the stage.
    """
    shards = sorted((file for file in manifest.files if file.name.endswith(WEIGHTS)), key=lambda file: file.bytes)
    chosen = {"full": shards, "sampled": shards[:1], "sizes": []}[depth]
    headers = [_start(store, manifest, file) for file in chosen]
    asked = [(f"{uri}/{file.name}", header) for file, header in zip(chosen, headers, strict=True)]
    found = streamer.digests(asked) if asked else ()
    return tuple(
        f"{file.name}: the tensors that engines stream are not those that were staged"
        for file, digest in zip(chosen, found, strict=True)
        if digest != file.sha256
    )


def _start(store: StageReader, manifest: Manifest, file: StagedFile) -> bytes:
    """A safetensors file up to its first tensor. Raises WeightsError where that is damaged."""

    def read(start: int, end: int) -> bytes:
        return b"".join(store.read(manifest.model, manifest.digest, file.name, start, end))

    length = read(0, LENGTH_BYTES)
    try:
        return length + read(LENGTH_BYTES, LENGTH_BYTES + header_bytes(length, file.bytes))
    except ValueError as error:
        raise WeightsError(f"reading the staged {file.name}", seen=str(error), do="Stage again.") from None


class _Span(NamedTuple):
    """Blocks of one file that are read by one request."""

    file: StagedFile
    first: int
    blocks: int

    @property
    def start(self) -> int:
        return self.first * BLOCK_BYTES

    @property
    def end(self) -> int:
        return min(self.file.bytes, self.start + self.blocks * BLOCK_BYTES)


def _look(store: StageReader, manifest: Manifest, span: _Span) -> list[tuple[StagedFile, int]]:
    """Blocks of a span that are not what was staged, by their numbers."""
    digest, at, number, wrong = blake3(), span.start, span.first, []
    for piece in store.read(manifest.model, manifest.digest, span.file.name, span.start, span.end):
        view = memoryview(piece)
        while view:
            cut = min(len(view), (number + 1) * BLOCK_BYTES - at)
            digest.update(view[:cut])
            at, view = at + cut, view[cut:]
            if at in ((number + 1) * BLOCK_BYTES, span.end):
                if digest.hexdigest(16) != span.file.blocks[number]:
                    wrong.append((span.file, number))
                digest, number = blake3(), number + 1
    if at < span.end:  # it has become shorter since it was listed
        wrong.append((span.file, number))
    return wrong


def _places(wrong: Sequence[tuple[StagedFile, int]], name: str) -> str:
    """Where the bytes of a file are wrong."""
    starts = [(number * BLOCK_BYTES, file.bytes) for file, number in wrong if file.name == name]
    first, total = starts[0]
    more = f", and in {len(starts) - 1} more places" if len(starts) > 1 else ""
    return f", between {first:,} and {min(total, first + BLOCK_BYTES):,}{more}"
