"""Staging: from a source of weights to a complete, content-addressed copy that engines can stream from.

Decided and ordered here; bytes are moved by the two Protocols. A stage is complete or it does not exist: the manifest
is written when every file is in its place, and the pointer moves after that.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from threading import Event, Lock
from typing import Any, Protocol

from warmers.blocks import BLOCK_BYTES, Passing, blocks_of, joined
from warmers.errors import SourceChanged, WeightsError
from warmers.lease import Fence
from warmers.safetensors import LENGTH_BYTES, Header, header_bytes, parse_header
from warmers.weights import (
    CONFIG,
    INDEX,
    WEIGHTS,
    Manifest,
    SourceFile,
    StagedFile,
    StageStep,
    WeightSource,
    digest_of,
    findings,
    needed,
    plan_stage,
)

READERS = 2
"""Files that are hashed at once; each keeps one core busy."""
MOVERS = 2
"""Files that are sent or copied at once: while one is being completed the other goes on."""
TELL_EVERY_S = 0.5
MAX_SHOWN = 5


@dataclass(frozen=True, slots=True)
class StageProgress:
    """How far a run is."""

    files: int
    total_files: int
    bytes: int
    total_bytes: int
    seconds: float
    """Since the first file began to move."""

    @property
    def bytes_per_s(self) -> float:
        """Files that were kept or copied count as well."""
        return self.bytes / self.seconds if self.seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """At that rate; None before anything has moved."""
        return (self.total_bytes - self.bytes) / self.bytes_per_s if self.bytes_per_s else None


OnProgress = Callable[[StageProgress], None]


class StageStore(Protocol):
    """Where stages of models are kept."""

    def manifests(self, model: str) -> Sequence[Manifest]:
        """Of every complete stage."""

    def present(self, model: str, digest: str) -> Mapping[str, tuple[int, str]]:
        """Bytes and SHA-256 of the objects of a stage, complete or not, by file name."""

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

    def copy(self, model: str, digest: str, file: StagedFile, model_digest: str) -> None:
        """Copy one file from another stage of the model, without moving its bytes through here."""

    def read(self, model: str, digest: str, name: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Bytes of one object, in pieces; `end` is behind the last."""

    def distrust(self, model: str, digest: str, names: Sequence[str]) -> None:
        """Have files sent anew by the next run, whatever is there."""

    def publish(self, manifest: Manifest, now: float) -> str:
        """Write the manifest, then move the model's pointer to it; the URI of the stage."""


@dataclass(frozen=True, slots=True)
class Staged:
    """What a run did."""

    manifest: Manifest
    uri: str
    sent_bytes: int
    sent: tuple[str, ...]
    copied: tuple[str, ...]
    kept: tuple[str, ...]
    seconds: float


def stage(
    source: WeightSource,
    model: str,
    store: StageStore,
    fence: Fence,
    now: Callable[[], float],
    on_event: Callable[[str], None] = lambda _: None,
    on_progress: OnProgress = lambda _: None,
) -> Staged:
    """Stage `model` from `source`: read what is new, check that it is complete, send what is not there, publish.

    `fence`: of the model's lease, without which nobody removes stages of it. Raises WeightsError for what no engine
    could load, SourceUnavailable, BucketUnavailable, BucketRefused and LeaseLost. Safe to repeat after a kill at any
    moment: what was sent is found, and a pointer never names an incomplete stage.
    """
    began = now()
    revision = source.resolve()
    files = needed(source.files(), str(source))
    known = store.manifests(model)
    headers = {file.name: header for file in files if (header := read_header(source, file)) is not None}
    require_complete(source, files, headers)
    staged = digests(source, files, headers, known, on_event)
    digest = digest_of(staged)
    elsewhere = {f.sha256: m.digest for m in known for f in m.files if m.digest != digest}
    steps = plan_stage(staged, store.present(model, digest), elsewhere)
    blocks = _carry_out(steps, source, {f.name: f for f in files}, (model, digest), store, fence, now, on_progress)
    whole = (replace(f, blocks=f.blocks or blocks.get(f.name) or _blocks(store, model, digest, f)) for f in staged)
    manifest = Manifest(model, digest, str(source), revision, tuple(sorted(whole, key=lambda f: f.name)))
    fence.check()
    uri = store.publish(manifest, now())
    names = {how: tuple(s.file.name for s in steps if s.how == how) for how in ("send", "copy", "keep")}
    sent = sum(step.file.bytes for step in steps if step.how == "send")
    return Staged(manifest, uri, sent, names["send"], names["copy"], names["keep"], now() - began)


def digests(
    source: WeightSource,
    files: Sequence[SourceFile],
    headers: Mapping[str, Header],
    known: Sequence[Manifest],
    on_event: Callable[[str], None],
) -> list[StagedFile]:
    """Every file with its SHA-256, its blocks where they are known and, of safetensors, what its header says.

    A digest is taken from the source where it says one, from an earlier stage where the source's version of the file is
    the same, and else from its bytes.
    """
    before = {(m.source, f.name, f.version): f.sha256 for m in known for f in m.files}
    blocks = {f.sha256: f.blocks for m in known for f in m.files}

    def digest(file: SourceFile) -> StagedFile:
        header = headers.get(file.name)
        of_header = (len(header.tensors), header.parameters, header.dtypes) if header else (0, 0, ())
        there = file.sha256 or before.get((str(source), file.name, file.version))
        if there is not None:
            return StagedFile(file.name, file.bytes, there, file.version, *of_header, blocks.get(there, ()))
        on_event(f"reading {file.name}, {file.bytes:,} bytes")
        whole, seen = sha256(), list[str]()
        for block in joined(moving.until_stopped(source.read(file)), BLOCK_BYTES):
            whole.update(block)
            seen += blocks_of(block)
        return StagedFile(file.name, file.bytes, whole.hexdigest(), file.version, *of_header, tuple(seen))

    with _threads(READERS) as (pool, moving):
        return list(pool.map(digest, files))


def require_complete(source: WeightSource, files: Sequence[SourceFile], headers: Mapping[str, Header]) -> None:
    """Raise WeightsError, naming everything that keeps an engine from loading these files."""
    by_name = {file.name: file for file in files}

    def document(name: str) -> dict[str, Any]:
        if name not in by_name:
            return {}
        try:
            found = json.loads(b"".join(source.read(by_name[name])))
        except ValueError as error:
            raise _damaged(source, name, str(error)) from None
        if not isinstance(found, dict):
            raise _damaged(source, name, "it is no JSON object")
        return found

    index = document(INDEX) if INDEX in by_name else None
    wrong = findings(by_name, headers, document(CONFIG), index, document("tokenizer_config.json"))
    if wrong:
        more = f"; and {len(wrong) - MAX_SHOWN} more" if len(wrong) > MAX_SHOWN else ""
        raise WeightsError(
            f"looking whether {source} is complete",
            seen="; ".join(wrong[:MAX_SHOWN]) + more,
            do="Complete the source; nothing was staged, and the current stage stays.",
        )


def read_header(source: WeightSource, file: SourceFile) -> Header | None:
    """What a safetensors file says that it holds; None for other files. Raises WeightsError where it is damaged."""
    if not file.name.endswith(WEIGHTS):
        return None
    pieces, start = source.read(file), b""
    try:
        while len(start) < LENGTH_BYTES and (piece := next(pieces, b"")):
            start += piece
        length = LENGTH_BYTES + header_bytes(start, file.bytes)
        while len(start) < length and (piece := next(pieces, b"")):
            start += piece
        return parse_header(start[LENGTH_BYTES:length], file.bytes)
    except ValueError as error:
        raise _damaged(source, file.name, str(error)) from None


def _damaged(source: WeightSource, name: str, seen: str) -> WeightsError:
    return WeightsError(f"reading {name} of {source}", seen=seen, do="Get the file anew; nothing was staged.")


@dataclass(slots=True)
class _Moving:
    """What the threads that move files tell the one that waits for them, and it them."""

    lock: Lock = field(default_factory=Lock)
    stopped: Event = field(default_factory=Event)
    total: int = 0

    def moved(self, count: int) -> None:
        with self.lock:
            self.total += count

    def until_stopped(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            if self.stopped.is_set():
                raise _Stopped
            yield piece


class _Stopped(Exception):
    """Another file could not be read or moved, or the run was interrupted."""


@contextmanager
def _threads(count: int) -> Iterator[tuple[ThreadPoolExecutor, _Moving]]:
    """Threads that stop at the next piece of their file when the block fails."""
    moving = _Moving()
    with ThreadPoolExecutor(count, "stage") as pool:
        try:
            yield pool, moving
        except BaseException:
            moving.stopped.set()
            pool.shutdown(cancel_futures=True)
            raise


def _carry_out(
    steps: Sequence[StageStep],
    source: WeightSource,
    files: Mapping[str, SourceFile],
    stage: tuple[str, str],
    store: StageStore,
    fence: Fence,
    now: Callable[[], float],
    on_progress: OnProgress,
) -> dict[str, tuple[str, ...]]:
    """Move files, a few at once; blocks of those that were sent, by name."""
    total, began = sum(step.file.bytes for step in steps), now()

    def move(step: StageStep) -> tuple[str, ...]:
        if step.how == "send":
            return store.send(*stage, step.file, read(files[step.file.name]), moving.moved)
        if step.how == "copy":
            store.copy(*stage, step.file, step.copied_from)
        moving.moved(step.file.bytes)
        return step.file.blocks

    def read(file: SourceFile) -> Callable[[int], Iterator[bytes]]:
        return lambda start: moving.until_stopped(source.read(file, start))

    with _threads(MOVERS) as (pool, moving):
        running = {pool.submit(move, step): step.file.name for step in steps}
        pending, done = set(running), set[Future[tuple[str, ...]]]()
        while pending:
            done, pending = wait(pending, timeout=TELL_EVERY_S, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()
            fence.check()
            on_progress(StageProgress(len(steps) - len(pending), len(steps), moving.total, total, now() - began))
    return {name: future.result() for future, name in running.items()}


def _blocks(store: StageStore, model: str, digest: str, file: StagedFile) -> tuple[str, ...]:
    """Of a file that a killed run had sent, read back. Raises SourceChanged where it is another.

    It is sent anew by the next run then.
    """
    passing = Passing(file)
    try:
        for block in joined(store.read(model, digest, file.name), BLOCK_BYTES):
            passing.take(block)
        passing.end()
    except SourceChanged:
        store.distrust(model, digest, [file.name])
        raise
    return tuple(passing.blocks)
