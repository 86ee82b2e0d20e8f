"""Blocks: what of a file of weights is sent, read and compared by itself.

What files there are does not belong here (`warmers/weights.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from blake3 import blake3

from warmers.errors import SourceChanged
from warmers.weights import StagedFile

BLOCK_BYTES = 16 << 20
"""What is sent, and can be verified, by itself."""


def blocks_of(content: bytes) -> Iterator[str]:
    """BLAKE3 of its blocks, in order; of content that starts at a block's start."""
    view = memoryview(content)
    return (blake3(view[at : at + BLOCK_BYTES]).hexdigest(16) for at in range(0, len(content), BLOCK_BYTES))


def joined(pieces: Iterator[bytes], size: int) -> Iterator[bytes]:
    """The same bytes in pieces of `size`, the last one apart."""
    held, length = list[bytes](), 0
    for piece in pieces:
        at = 0
        while length + len(piece) - at >= size:
            cut = at + size - length
            yield b"".join((*held, piece[at:cut]))
            held, length, at = [], 0, cut
        if at < len(piece):
            held.append(piece[at:])
            length += len(piece) - at
    if held:
        yield b"".join(held)


@dataclass(slots=True)
class Passing:
    """The bytes of a file as they pass, compared with what is known of it: its blocks, or else its SHA-256."""

    file: StagedFile
    at: int = 0
    """Bytes that have passed, or were skipped: whole blocks."""
    blocks: list[str] = field(default_factory=list)
    """Of what has passed."""
    digest: Any = None

    def __post_init__(self) -> None:
        if not self.file.blocks and self.at == 0:
            self.digest = sha256()

    def take(self, body: bytes) -> None:
        """The next bytes, whole blocks but for the last. Raises SourceChanged."""
        found, first = list(blocks_of(body)), self.at // BLOCK_BYTES
        self.at += len(body)
        if self.file.blocks and found != list(self.file.blocks[first : first + len(found)]):
            raise self._changed(f"other bytes before {self.at:,}")
        if self.digest is not None:
            self.digest.update(body)
        self.blocks += found

    def end(self) -> None:
        """There are no more. Raises SourceChanged."""
        if self.at != self.file.bytes:
            raise self._changed(f"{self.at:,} bytes")
        if self.digest is not None and self.digest.hexdigest() != self.file.sha256:
            raise self._changed(f"SHA-256 {self.digest.hexdigest()[:12]}…")

    def _changed(self, seen: str) -> SourceChanged:
        return SourceChanged(
            f"sending {self.file.name}",
            seen=f"{seen}, not the {self.file.bytes:,} with SHA-256 {self.file.sha256[:12]}… that were read before",
            do="It changed meanwhile, or was damaged on the way: stage again when nobody writes to it.",
        )
