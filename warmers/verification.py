"""Whether a stage still is what its manifest says: existence and sizes, samples of its blocks, or every byte."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from random import Random
from typing import Literal, NamedTuple, Protocol
from zlib import crc32

from warmers.weights import BLOCK_BYTES, Manifest, StagedFile, damage

Depth = Literal["sizes", "sampled", "full"]
READERS = 4
"""Objects or blocks that are read at once."""


class StageReader(Protocol):
    """A store of stages, as far as verifying needs it."""

    def sizes(self, model: str, digest: str) -> dict[str, int]:
        """Bytes of a stage's objects by file name, the manifest apart."""

    def read(self, model: str, digest: str, name: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Bytes of one object, in pieces; `end` is behind the last."""


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
    looks: list[Callable[[], _Seen]] = []
    if depth == "full":
        looks = [partial(_whole, store, manifest, file) for file in whole]
    elif depth == "sampled":
        blocks = [(file, number) for file in whole for number in range(len(file.blocks))]
        chosen = (random or Random()).sample(blocks, min(samples, len(blocks)))  # noqa: S311 - a sample, no secret
        looks = [partial(_block, store, manifest, file, number) for file, number in chosen]
    with ThreadPoolExecutor(READERS, "verify") as pool:
        seen = list(pool.map(lambda look: look(), looks))
    wrong = [one for one in seen if one.where is not None]
    said = (f"{one.name} has other bytes than were staged{one.where}" for one in wrong)
    return Verified((*found, *said), tuple(sorted({one.name for one in wrong})), sum(one.bytes for one in seen))


class _Seen(NamedTuple):
    """What reading one object or block of it gave."""

    name: str
    where: str | None
    """None: it is right."""
    bytes: int


def _whole(store: StageReader, manifest: Manifest, file: StagedFile) -> _Seen:
    digest = sha256()
    for piece in store.read(manifest.model, manifest.digest, file.name):
        digest.update(piece)
    return _Seen(file.name, None if digest.hexdigest() == file.sha256 else "", file.bytes)


def _block(store: StageReader, manifest: Manifest, file: StagedFile, number: int) -> _Seen:
    start, crc = number * BLOCK_BYTES, 0
    end = min(file.bytes, start + BLOCK_BYTES)
    for piece in store.read(manifest.model, manifest.digest, file.name, start, end):
        crc = crc32(piece, crc)
    where = None if crc == file.blocks[number] else f", between {start:,} and {end:,}"
    return _Seen(file.name, where, end - start)
