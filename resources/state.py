"""The state store: one tree at an fsspec URI, of immutable documents and of pointers moved by conditional write.

    fleets/<fleet>/{templates,rendered,prefixes,plan,warm,proof}.json  pointers to the latest
    fleets/<fleet>/{templates,…}/<time>-<random>.*                   what they point to
    fleets/<fleet>/namespaces/<namespace>.json                       those it was warmed in
    namespaces/<namespace>/lease.json
    namespaces/<namespace>/chunks/<time>-<random>.parquet            segments of the ledger, oldest first

Deciding what to write does not belong here.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from resources.objects import Objects, open_objects
from warmers.changes import Entry, Listing, SourceFile
from warmers.keys import Hashes
from warmers.ledger import Rows, merge
from warmers.life import NamespaceRecord
from warmers.prefixes import Prefix, PrefixSet
from warmers.templates import Failed
from warmers.variations import Variation

if TYPE_CHECKING:
    import pyarrow as pa

COMPACT_AT = 32
"""Ledger segments beyond which they are rewritten as one."""
LISTING_FORMAT = 2
"""Of a stored listing; one of another format is read anew."""
PREFIX_FORMAT = 4
"""Of a stored prefix set; one of another format is rendered again."""
PLAIN_FIELDS = tuple(f.name for f in fields(Prefix) if f.name not in ("rendered", "variations"))
"""Of a prefix: those that a column holds as they are."""
TEXTS = ("salt", "template", "source", "weights")
"""Columns of the ledger."""
IDS = np.dtype("<u4")
"""Token ids in a stored prefix set."""
ROW_GROUP = 500
ListingKind = Literal["templates", "rendered"]
KEEP = 20
"""Immutable documents of a kind kept behind a pointer."""


def open_state(uri: str) -> "StateStore":
    """The state store at a directory or an s3:// URI. Raises ConfigError for other schemes."""
    return StateStore(open_objects(uri), uri)


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
        pointer = json.dumps({"uri": self.uri_of(path), "path": path, **summary}, indent=2).encode()
        name = f"fleets/{fleet}/{kind}.json"
        while not self.objects.replace(name, pointer, _version(self.objects.read(name))):
            continue
        for old in self.objects.list(directory)[:-KEEP]:
            self.objects.delete(old)
        return self.uri_of(path)

    def uri_of(self, path: str) -> str:
        """Where people find a file or directory of the tree."""
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

    def save_listing(self, fleet: str, listing: Listing, kind: ListingKind = "templates") -> None:
        """Remember what the fleet's source holds, or what its prefixes were made from."""
        summary = {"digest": listing.digest, "format": LISTING_FORMAT}
        self.point(fleet, kind, json.dumps(asdict(listing)).encode(), ".json", summary)

    def listing(self, fleet: str, kind: ListingKind = "templates") -> Listing:
        """What the fleet's source held when it was last looked at, or when its prefixes were made; empty before."""
        pointer = self.latest(fleet, kind) or {}
        found = self.objects.read(pointer["path"]) if pointer.get("format") == LISTING_FORMAT else None
        if found is None:
            return Listing()
        whole = json.loads(found[0])
        return Listing(
            {label: Entry(*entry) for label, entry in whole["templates"].items()},
            whole["broken"],
            {path: SourceFile(stamp, tuple(documents)) for path, (stamp, documents) in whole["files"].items()},
        )

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

    def save_namespace(self, fleet: str, record: NamespaceRecord) -> None:
        """Remember a namespace of a fleet."""
        self.objects.write(_namespace_path(fleet, record.name), json.dumps(asdict(record)).encode())

    def namespaces(self, fleet: str) -> list[NamespaceRecord]:
        """Every namespace that the fleet was warmed in and that was not removed."""
        found = (self.objects.read(path) for path in self.objects.list(f"fleets/{fleet}/namespaces"))
        return [NamespaceRecord(**json.loads(content[0])) for content in found if content]

    def drop_namespace(self, fleet: str, name: str) -> None:
        """Forget a namespace and its ledger."""
        for segment in self.objects.list(ledger_directory(name)):
            self.objects.delete(segment)
        self.objects.delete(_namespace_path(fleet, name))

    def ledger_uri(self, namespace: str) -> str:
        """Where people find a namespace's ledger."""
        return self.uri_of(ledger_directory(namespace))

    def journal(self, namespace: str) -> "LedgerFiles":
        """The ledger of a namespace."""
        return LedgerFiles(self.objects, ledger_directory(namespace))


@dataclass(frozen=True, slots=True)
class LedgerFiles:
    """A ledger as parquet segments. Satisfies warmers.ledger.Journal; written under the namespace's lease."""

    objects: Objects
    directory: str

    def record(self, rows: Rows) -> None:
        """Append a segment; past COMPACT_AT of them, rewrite all as one."""
        segments = self.objects.list(self.directory)
        if len(segments) >= COMPACT_AT:
            self.rewrite(merge([*self._read(segments), rows]))
        else:
            self._append(rows)

    def rows(self) -> Rows:
        """Every chunk's latest row."""
        return merge(self._read(self.objects.list(self.directory)))

    def rewrite(self, rows: Rows) -> None:
        """Write one segment of these, then delete the others."""
        segments = self.objects.list(self.directory)
        self._append(rows)
        for segment in segments:
            self.objects.delete(segment)

    def _append(self, rows: Rows) -> None:
        self.objects.write(f"{self.directory}/{_stamp()}.parquet", _rows_to_parquet(rows))

    def _read(self, segments: list[str]) -> list[Rows]:
        found = (self.objects.read(segment) for segment in segments)
        return [_rows_from_parquet(content[0]) for content in found if content]


def _namespace_path(fleet: str, name: str) -> str:
    return f"fleets/{fleet}/namespaces/{name}.json"


def ledger_directory(namespace: str) -> str:
    """Where a namespace's ledger is in the tree."""
    return f"namespaces/{namespace}/chunks"


def _stamp() -> str:
    """Sorts by time: nanoseconds since the epoch, then something random."""
    return f"{time.time_ns():020d}-{uuid4().hex[:8]}"


def _version(found: tuple[bytes, str] | None) -> str | None:
    return found[1] if found else None


def _rows_to_parquet(rows: Rows) -> bytes:
    """Digests as bytes, texts as dictionaries."""
    import pyarrow as pa
    from pyarrow import parquet

    digests = pa.py_buffer(np.ascontiguousarray(rows.digest))
    columns: dict[str, Any] = {f.name: getattr(rows, f.name) for f in fields(Rows)}
    for name in TEXTS:
        columns[name] = pa.array(columns[name], pa.string()).dictionary_encode()
    columns["digest"] = pa.FixedSizeBinaryArray.from_buffers(pa.binary(32), len(rows), [None, digests])
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.table(columns), sink, compression="zstd")
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _rows_from_parquet(content: bytes) -> Rows:
    import pyarrow as pa
    from pyarrow import parquet

    table = parquet.read_table(pa.BufferReader(content), read_dictionary=list(TEXTS)).combine_chunks()
    return Rows(*(_column(table.column(f.name)) for f in fields(Rows)))


def _column(column: "pa.ChunkedArray") -> NDArray[Any]:
    """One column as numpy: each distinct text once, a digest as a row of bytes."""
    import pyarrow as pa

    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # of no rows
        array = array.chunk(0) if array.num_chunks else pa.array([], array.type)
    if pa.types.is_dictionary(array.type):
        texts = np.array([*array.dictionary.to_pylist(), None], np.object_)
        found: NDArray[np.object_] = texts[array.indices.to_numpy(zero_copy_only=False)]
        return found
    if pa.types.is_fixed_size_binary(array.type):
        digests: Hashes = np.frombuffer(array.buffers()[1] or b"", np.uint8)[: len(array) * 32].reshape(-1, 32)
        return digests
    return np.array(array.to_numpy(zero_copy_only=False))


def _prefixes_to_parquet(prefixes: PrefixSet) -> bytes:
    """A row a prefix; what failed goes into the file's metadata.

    Token ids are bytes, in groups of rows: ten thousand prefixes have forty million, and as one list column those take
    six times their size to read.
    """
    import pyarrow as pa
    from pyarrow import parquet

    found = prefixes.found
    columns: dict[str, list[Any]] = {name: [getattr(p, name) for p in found] for name in PLAIN_FIELDS}
    columns["rendered"] = [p.rendered.astype(IDS).tobytes() for p in found]
    columns["variations"] = [json.dumps([asdict(v) for v in p.variations]) for p in found]
    failed = json.dumps([asdict(f) for f in prefixes.failed])
    sink = pa.BufferOutputStream()
    table = pa.table(columns, metadata={"failed": failed})
    parquet.write_table(table, sink, compression="zstd", row_group_size=ROW_GROUP)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _prefixes_from_parquet(content: bytes) -> PrefixSet:
    import pyarrow as pa
    from pyarrow import parquet

    file = parquet.ParquetFile(pa.BufferReader(content))
    found = []
    for row in chain.from_iterable(batch.to_pylist() for batch in file.iter_batches(ROW_GROUP)):
        row["rendered"] = np.frombuffer(row["rendered"], IDS)
        row["variations"] = tuple(
            Variation(v["where"], tuple(v["values"]), v["lost_chars"]) for v in json.loads(row["variations"])
        )
        found.append(Prefix(**row))
    failed = json.loads(file.schema_arrow.metadata[b"failed"])
    return PrefixSet(tuple(found), tuple(Failed(**f) for f in failed))
