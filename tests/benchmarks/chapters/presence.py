"""What it costs to ask L2 for chunks."""

import socket
from pathlib import Path
from urllib.parse import urlsplit

import hiredis
import numpy as np
from benchmarks.clock import best_of
from benchmarks.fleets import fill, running_valkey
from benchmarks.registry import benchmark

from resources.valkey_store import BATCH, ValkeyStore
from warmers.keys import KeyLayout, KeyTable
from warmers.presence import look

CHUNKS = 100_000
TURNS = 5


@benchmark("presence_over_raw_exists", "presence_over_bare_exists")
def presence(directory: Path) -> dict[str, float]:
    """`look` at 100,000 chunks, half of them there, over EXISTS of the same keys in pipelines of the same length."""
    hashes = np.random.default_rng(0).integers(0, 256, (CHUNKS, 32), dtype=np.uint8)
    names = tuple(KeyTable(hashes, KeyLayout("/models/0123456789abcdef", prefix="chat-0123456789abcdef")))
    with running_valkey(directory) as store:
        fill(store, names[::2], b"x" * 64)
        found = look(store, names, 1, 64).complete
        if (
            int(found.sum()) != CHUNKS // 2
            or _exists(store, names) != CHUNKS // 2
            or _bare(store, names) != CHUNKS // 2
        ):
            raise AssertionError("the three ways of asking do not agree on what is there")
        ours, raw, bare = best_of(
            TURNS,
            lambda: look(store, names, 1, 64).complete,
            lambda: _exists(store, names),
            lambda: _bare(store, names),
        )
    return {"presence_over_raw_exists": ours / raw, "presence_over_bare_exists": ours / bare}


def _exists(store: ValkeyStore, names: tuple[str, ...]) -> int:
    found = 0
    for start in range(0, len(names), BATCH):
        pipeline = store.client.pipeline(transaction=False)
        for name in names[start : start + BATCH]:
            pipeline.exists(name)
        found += sum(pipeline.execute())
    return found


def _bare(store: ValkeyStore, names: tuple[str, ...]) -> int:
    """As fast as a client in Python can be: nothing but packing, sending, receiving and parsing."""
    address = urlsplit(store.access.url)
    reader, found = hiredis.Reader(), 0
    with socket.create_connection((address.hostname, address.port)) as connection:
        for start in range(0, len(names), BATCH):
            batch = names[start : start + BATCH]
            connection.sendall(b"".join([hiredis.pack_command(("EXISTS", name)) for name in batch]))
            awaited = len(batch)
            while awaited:
                reader.feed(connection.recv(1 << 16))
                while (answer := reader.gets()) is not False:
                    found += answer
                    awaited -= 1
    return found
