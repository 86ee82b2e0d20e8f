"""Every tier breaks in the middle of a warm: what was written counts, and the next run computes only the rest.

What is said names the tier and the call.

Real servers and file systems; the engine is a fake at the Protocol seam, which writes as LMCache does: what cannot be
written is swallowed.
"""

import errno
import os
import signal
import time
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
from fakes import CHUNK, FakeClock, FakeEngine, FreeFence, MemoryJournal, ValkeyValues, make_fleet, make_prefix, words
from redis import Redis
from s3_proxy import between
from small_disks import mounted
from valkey_servers import cluster, needs_tls, server

from resources.file_store import FileStore
from resources.s3 import s3_client
from resources.s3_store import S3Store
from resources.valkey_access import ValkeyAccess
from resources.valkey_credentials import PasswordFile
from resources.valkey_store import ValkeyStore
from warmers.errors import ConfigError, NotWarm, StoreUnavailable
from warmers.fleet import WarmLimits
from warmers.ledger import unknown_chunks
from warmers.plan import plan_warm
from warmers.presence import look
from warmers.warm import warm

TEXTS = ("abc", "def", "ghi", "jkl")
STRUCK = 2
"""The prefill in which it breaks: by then two prefixes are written."""


class Bench:
    """A fleet that is warmed prefix by prefix, and what breaks during the third."""

    def __init__(self, kind, store, values):
        limits = WarmLimits(concurrency=1, visible_deadline_s=0.5)
        self.fleet = replace(make_fleet(limits=limits), store=kind)
        self.store, self.journal = store, MemoryJournal()
        self.engine = FakeEngine(self.fleet, values)
        self.prefixes = [make_prefix(words(text), text) for text in TEXTS]

    def plan(self):
        size = self.fleet.chunk_bytes
        return plan_warm(self.prefixes, self.fleet, lambda tree: look(self.store, tree.names, 1, size))

    def warm(self):
        return warm(self.plan(), self.engine, self.store, self.journal, FreeFence(), FakeClock())

    def breaks(self, strike):
        self.engine.on_prefill = lambda number: strike() if number == STRUCK else None


class FileValues:
    """Files as LMCache's fs adapter writes them."""

    def __init__(self, store):
        self.directory = store.directory

    def put(self, key, value):
        path = self.directory / key
        try:
            path.parent.mkdir(exist_ok=True)
            path.with_suffix(".tmp").write_bytes(value)
            path.with_suffix(".tmp").replace(path)
        except OSError:
            return False
        return True

    def get(self, key):
        try:
            return (self.directory / key).read_bytes()
        except OSError:
            return None


class ObjectValues:
    """Objects as LMCache's s3 adapter writes them, past what stands between the store and the server."""

    def __init__(self, bucket):
        self.client, self.bucket = s3_client(), bucket

    def put(self, key, value):
        self.client.put_object(Bucket=self.bucket, Key=key, Body=value)

    def get(self, key):
        found = self.client.list_objects_v2(Bucket=self.bucket, Prefix=key).get("KeyCount", 0)
        return self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read() if found else None


def on_valkey(url, store=None):
    """`store`: another way to the same server than the engine's."""
    plain = ValkeyStore.at(url)
    return Bench("valkey", store or plain, ValkeyValues(plain, 3600))


@contextmanager
def failover(tmp_path, _):
    """The address goes on to be that of the old primary, a reader now; then it is the new one's."""
    with server(tmp_path / "old") as old, server(tmp_path / "new", None, "--replicaof", f"127.0.0.1 {old.port}") as new:

        def strike():
            while new.admin.info("replication")["master_link_status"] != "up":
                time.sleep(0.05)
            old.admin.execute_command("WAIT", 1, 5000)
            new.admin.replicaof("NO", "ONE")
            old.admin.replicaof("127.0.0.1", new.port)

        bench = on_valkey(old.url)
        bench.breaks(strike)

        def mend():
            bench.store = ValkeyStore.at(new.url)
            bench.engine.store = ValkeyValues(bench.store, 3600)

        yield bench, StoreUnavailable, r"ReadOnlyError.*after a failover run again", mend


@contextmanager
def no_answer(tmp_path, request):
    request.getfixturevalue("monkeypatch").setattr("resources.valkey_access.TIMEOUT_S", 0.2)
    with server(tmp_path) as started:
        bench, pid = on_valkey(started.url), started.processes.running("valkey").pid
        bench.breaks(lambda: os.kill(pid, signal.SIGSTOP))
        says = r"asking for sizes of \d+ keys in Valkey.*Timeout"
        yield bench, StoreUnavailable, says, lambda: os.kill(pid, signal.SIGCONT)


@contextmanager
def credentials_end(tmp_path, request):
    """The password is changed on the server before anybody changes it in the file."""
    password = tmp_path / "password"
    password.write_text("first")
    with server(tmp_path / "secure", request.getfixturevalue("certificates")) as started:
        started.admin.execute_command("ACL", "SETUSER", "warmfront", "on", ">first", "~*", "+@all")
        who = PasswordFile("warmfront", password)
        store = ValkeyStore(ValkeyAccess(started.url, who, started.certificates.ca))

        def strike():
            started.admin.execute_command("ACL", "SETUSER", "warmfront", "resetpass", ">second")
            started.admin.execute_command("CLIENT", "KILL", "USER", "warmfront")

        bench = Bench("valkey", store, ValkeyValues(_Client(started), 3600))
        bench.breaks(strike)
        says = r"in Valkey at rediss://127.0.0.1.*invalid username-password pair.*Correct l2.username"
        yield bench, ConfigError, says, lambda: password.write_text("second")


class _Client:
    """The default user's, who needs no password: the engine's own way there."""

    def __init__(self, started):
        self.client = Redis.from_url(started.url, ssl_ca_certs=str(started.certificates.ca), ssl_check_hostname=False)


@contextmanager
def a_node_goes(tmp_path, _):
    """One of three; what it held is there again with it."""
    with cluster(tmp_path, None, "--cluster-require-full-coverage", "no", "--save", "3600 1") as nodes:
        store = ValkeyStore(ValkeyAccess(nodes.url, cluster=True))
        bench = Bench("valkey", store, ValkeyValues(store, 3600))
        bench.breaks(nodes.nodes[2].stop)
        yield bench, StoreUnavailable, r"asking for sizes of \d+ keys in Valkey", lambda: nodes.start_again(2)


@contextmanager
def disk_full(tmp_path, _):
    with mounted(tmp_path / "kv", "size=64k") as directory:
        store = FileStore(directory, 3600)
        bench = Bench("fs", store, FileValues(store))

        def strike():
            with suppress(OSError), (directory / "filler").open("wb") as filler:
                while True:
                    filler.write(bytes(4096))
                    filler.flush()

        bench.breaks(strike)
        yield bench, NotWarm, "cannot write to L2", (directory / "filler").unlink


@contextmanager
def stale_mount(tmp_path, request):
    (tmp_path / "kv").mkdir()
    store = FileStore(tmp_path / "kv", 3600)
    bench = Bench("fs", store, FileValues(store))
    with pytest.MonkeyPatch.context() as patch:

        def stale(*_, **__):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

        bench.breaks(lambda: patch.setattr("resources.file_store.os.stat", stale))
        says = r"asking for sizes of \d+ files.*Stale file handle. Check that it is mounted"
        yield bench, StoreUnavailable, says, patch.undo


@contextmanager
def slow_down(tmp_path, request):
    """S3 takes no more requests for a while."""
    bucket = request.getfixturevalue("s3_uri").split("/")[2]
    endpoint, struck = os.environ["AWS_ENDPOINT_URL"], []
    s3_client.cache_clear()
    with between(endpoint, lambda _: "SlowDown" if struck else None) as url:
        bench = Bench("s3", S3Store(bucket, 7, url), ObjectValues(bucket))
        bench.breaks(lambda: struck.append(1))
        yield bench, StoreUnavailable, rf"s3://{bucket}.*: (503|SlowDown)", struck.clear
    s3_client.cache_clear()


@pytest.mark.parametrize(
    "trouble",
    [
        failover,
        no_answer,
        pytest.param(credentials_end, marks=needs_tls),
        a_node_goes,
        disk_full,
        stale_mount,
        slow_down,
    ],
    ids=lambda trouble: trouble.__name__,
)
def test_what_was_written_counts_and_the_next_run_does_the_rest(tmp_path, request, trouble):
    with trouble(tmp_path, request) as (bench, error, says, mend):
        with pytest.raises(error, match=says):
            bench.warm()
        mend()
        bench.engine.on_prefill = lambda _: None
        left = bench.plan()
        assert left.missing_chunks <= 2 * len(TEXTS[0]), "two prefixes had been written"
        done = bench.warm()
        assert (done.computed_tokens, bench.plan().missing_chunks) == (left.missing_chunks * CHUNK, 0)
        every = range(len(left.tree.hashes))
        assert unknown_chunks(left.tree, every, bench.journal.rows()) == []
        bench.engine.forget()
        assert bench.warm().computed_tokens == 0
