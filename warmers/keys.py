"""LMCache's names for chunks: the hash chain and the key strings of MP mode.

Checked in the tests against LMCache 0.5.6's own resolver and against what a real daemon stored. What is
in a store does not belong here.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from warmers.errors import ConfigError
from warmers.fleet import Fleet, StoreKind
from warmers.salts import check_salt

TokenIds = NDArray[np.uint32]
Hashes = NDArray[np.uint8]
"""[chunk, 32]: one digest a row."""

# LMCache starts every chain at hash(prefix 0 as int64, one token 0), both big-endian.
ROOT_HASH = blake3(bytes(8) + bytes(4)).digest()
MAX_FILE_NAME = 255


def chunk_hashes(ids: TokenIds, chunk_tokens: int) -> Hashes:
    """The chained hash of every full chunk of `ids`: [len(ids) // chunk_tokens, 32]."""
    full = len(ids) // chunk_tokens
    if full == 0:
        return np.empty((0, 32), np.uint8)
    width = 4 * chunk_tokens
    raw = memoryview(np.ascontiguousarray(ids[: full * chunk_tokens], dtype=">u4").tobytes())
    digest, out = ROOT_HASH, bytearray()
    for start in range(0, full * width, width):
        digest = blake3(digest).update(raw[start : start + width]).digest()
        out += digest
    return np.frombuffer(bytes(out), np.uint8).reshape(full, 32)


@dataclass(frozen=True, slots=True)
class KeyLayout:
    """Everything in a key but its hash and its salt."""

    model: str
    """The --model string as the engine got it."""
    chunk_tokens: int = 256
    world_size: int = 1
    store: StoreKind = "valkey"
    prefix: str = ""
    """key_prefix of the valkey adapter, directory below the root of the fs adapter's. LMCache 0.5.6's s3 adapter has
    neither: there the namespace is in the model's path."""

    def __post_init__(self) -> None:
        if "@" in self.prefix:
            raise ValueError(f"key prefix {self.prefix!r}: LMCache refuses an @ in it")
        if self.prefix and self.store == "s3":
            raise ValueError(f"key prefix {self.prefix!r}: LMCache's s3 adapter knows none")
        if self.chunk_tokens < 1 or not 1 <= self.world_size <= 255:
            raise ValueError(f"chunk_tokens {self.chunk_tokens} and world_size {self.world_size} must be positive")

    @classmethod
    def of(cls, fleet: Fleet) -> "KeyLayout":
        """The layout of a fleet's keys in its own namespace."""
        return cls(
            model=fleet.model.path,
            chunk_tokens=fleet.engine.chunk_tokens,
            world_size=fleet.engine.tensor_parallel,
            store=fleet.store,
            prefix="" if fleet.store == "s3" else fleet.namespace,
        )

    @property
    def start(self) -> str:
        """What all keys of the namespace begin with, and no others."""
        return {"valkey": f"{self.prefix}@", "fs": f"{self.prefix}/", "s3": f"{self.model}@"}[self.store]

    def rank(self, rank: int) -> str:
        """LMCache's kv_rank of one tensor parallel rank on one node, 8 hex digits."""
        return f"{self.world_size << 24 | rank << 16 | self.world_size << 8 | rank:08x}"

    def name(self, digest: str, rank: int, salt: str = "") -> str:
        """The key of one chunk (64 hex digits) for one rank. The object group is 0: one KV layout a model.

        Raises ConfigError for one that no file can bear.
        """
        tail = f"@{salt}" if salt else ""
        if self.store == "fs":
            name = f"{self.model.replace('/', '-SEP-')}@0x{self.rank(rank)}@0@{digest}{tail}.data"
            if len(name.encode()) > MAX_FILE_NAME:
                raise ConfigError(
                    f"naming the file of a chunk of {self.model}",
                    seen=f"{name[:40]}… has {len(name.encode())} characters, and file systems take {MAX_FILE_NAME}",
                    do="LMCache could not store it: serve the model under a shorter path, or shorten the salt.",
                )
            return f"{self.start if self.prefix else ''}{name}"
        return f"{self.start if self.prefix else ''}{self.model}@{self.rank(rank)}@0@{digest}{tail}"


@dataclass(frozen=True, slots=True)
class KeyTable:
    """The keys of a run of chunks: `hashes` [chunk, 32], all of one layout and one salt."""

    hashes: Hashes
    layout: KeyLayout
    salt: str = ""

    def __iter__(self) -> Iterator[str]:
        """Chunk by chunk, each with all its ranks."""
        for row in self.hashes:
            digest = row.tobytes().hex()
            for rank in range(self.layout.world_size):
                yield self.layout.name(digest, rank, self.salt)


def chunk_keys(ids: TokenIds, layout: KeyLayout, salt: str = "") -> KeyTable:
    """The L2 keys of every full chunk of `ids`."""
    return KeyTable(chunk_hashes(ids, layout.chunk_tokens), layout, check_salt(salt))
