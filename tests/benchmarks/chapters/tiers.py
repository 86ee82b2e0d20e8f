"""What each L2 tier costs beside the plainest way of asking it, without an engine."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.clock import best_of
from benchmarks.fleets import fill, running_valkey
from benchmarks.registry import benchmark
from l2_adapters import adapter, builtin, plugin
from valkey_servers import WITH_TLS, Certificates, server

from resources.file_store import FileStore
from resources.local_stack import EMBEDDED_BUCKET, LocalStack
from resources.s3_store import ASKED_AT_ONCE, S3Store
from resources.valkey_store import BATCH
from warmers.presence import KVStore, look

TURNS = 5
KEYS, OBJECTS = 20_000, 2_000
CHUNKS, CHUNK_BYTES, LOADS = 8, 3_000_000, 25


@benchmark("presence_keys_per_s_over_raw_valkey")
def valkey(directory: Path) -> dict[str, float]:
    """`look` at 20,000 keys, half of them there, over redis-py's pipelined STRLEN, which says the same."""
    names = [f"ns@m@01000100@0@{n:064x}" for n in range(KEYS)]
    with running_valkey(directory) as store:
        fill(store, names[::2], b"x" * 64)

        def raw() -> list[int]:
            found = []
            for start in range(0, KEYS, BATCH):
                pipeline = store.client.pipeline(transaction=False)
                for name in names[start : start + BATCH]:
                    pipeline.strlen(name)
                found += pipeline.execute()
            return found

        return {"presence_keys_per_s_over_raw_valkey": _faster(store, names, raw, KEYS // 2)}


@benchmark("presence_keys_per_s_over_raw_fs")
def files(directory: Path) -> dict[str, float]:
    """The same with files, over os.stat of one after the other. On a local disk; a network's round trips are longer."""
    names = [f"ns/m@01000100@0@{n:064x}.data" for n in range(KEYS)]
    (directory / "ns").mkdir()
    for name in names[::2]:
        (directory / name).write_bytes(b"x" * 64)

    def raw() -> list[int]:
        found = []
        for name in names:
            try:
                found.append(os.stat(f"{directory}/{name}").st_size)
            except FileNotFoundError:
                found.append(0)
        return found

    return {"presence_keys_per_s_over_raw_fs": _faster(FileStore(directory), names, raw, KEYS // 2)}


@benchmark("presence_keys_per_s_over_raw_s3")
def bucket(directory: Path) -> dict[str, float]:
    """The same with 2,000 objects, over a HEAD each, 32 at once. On localbucket."""
    from botocore.exceptions import ClientError

    names = [f"/models/ns@01000100@0@{n:064x}" for n in range(OBJECTS)]
    stack = LocalStack(directory / "stack", on_event=lambda _: None)
    try:
        with stack.processes.locked():
            store = S3Store(EMBEDDED_BUCKET, 7, stack.ensure_bucket())
        for name in names[::2]:
            store.client.put_object(Bucket=store.bucket, Key=name, Body=b"x" * 64)

        def head(name: str) -> int:
            try:
                return store.client.head_object(Bucket=store.bucket, Key=name)["ContentLength"]
            except ClientError:
                return 0

        def raw() -> list[int]:
            with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
                return list(pool.map(head, names))

        return {"presence_keys_per_s_over_raw_s3": _faster(store, names, raw, OBJECTS // 2)}
    finally:
        stack.down()


def _faster(store: KVStore, names: list[str], raw: Callable[[], list[int]], there: int) -> float:
    """How many times more keys a second `look` asks for. Both have to find the same."""
    if int(look(store, names, 1, 64).complete.sum()) != there or sum(size == 64 for size in raw()) != there:
        raise AssertionError("the two ways of asking do not agree on what is there")
    ours, plain = best_of(TURNS, lambda: look(store, names, 1, 64).complete, raw)
    return plain / ours


@benchmark("iam_plugin_load_over_builtin", "iam_plugin_load_over_builtin_tls", "iam_plugin_load_ms")
def plugin_load(directory: Path) -> dict[str, float]:
    """Eight chunks of 3 MB into L1 by warmfront's adapter over LMCache's own `valkey`, in turns, medians of 25 each.

    From one server, plain and with TLS; both adapters with four workers.
    """
    if WITH_TLS is None:
        raise RuntimeError("there is no valkey-server or redis-server with TLS here")
    certificates = Certificates.make(directory / "certificates")
    plain, plain_ms = _load(directory / "plain", None)
    secure, _ = _load(directory / "secure", certificates)
    return {
        "iam_plugin_load_over_builtin": plain,
        "iam_plugin_load_over_builtin_tls": secure,
        "iam_plugin_load_ms": plain_ms,
    }


def _load(directory: Path, certificates: Certificates | None) -> tuple[float, float]:
    names = [f"chunk-{n}" for n in range(CHUNKS)]
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    with ExitStack() as stack:
        started = stack.enter_context(server(directory, certificates))
        tls: dict[str, Any] = {"tls": True, "ca_file": str(certificates.ca)} if certificates else {}
        trusted = {"SSL_CERT_FILE": str(certificates.ca)} if certificates else {}
        theirs = builtin(started.port, num_workers=4, tls_enable=bool(certificates))
        adapters = {
            "ours": stack.enter_context(adapter(plugin(started.port, num_workers=4, **tls))),
            "theirs": stack.enter_context(adapter(theirs, **trusted)),
        }
        adapters["ours"]("store", names=names, size=CHUNK_BYTES, fill=7)
        for turn in range(LOADS + 1):
            for name, one in adapters.items():
                answer = one("load", names=names, size=CHUNK_BYTES)
                if answer["fill"] != [7] * CHUNKS:
                    raise AssertionError(f"{name} loaded {answer}")
                if turn:  # the first makes connections
                    seconds[name].append(answer["seconds"])
    ours, theirs_s = median(seconds["ours"]), median(seconds["theirs"])
    return ours / theirs_s, 1000 * ours
