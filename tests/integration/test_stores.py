"""One behaviour of every L2 tier, each on its real server: what `KVStore` promises, whoever keeps the promise."""

import time

import numpy as np
import pytest
from valkey_servers import cluster, needs_tls

from resources.file_store import FileStore
from resources.s3_store import S3Store
from resources.valkey_access import ValkeyAccess
from resources.valkey_credentials import PasswordFile
from resources.valkey_store import ValkeyStore

DAY_S = 86_400


class Tier:
    """A store, the start of a namespace's keys, and how LMCache's daemon would write there."""

    def __init__(self, store, start, put):
        self.store, self.start, self.put = store, start, put

    def key(self, number, start=None):
        name = f"m@01000100@0@{number:064x}"
        return f"{start or self.start}{name}.data" if "/" in (start or self.start) else f"{start or self.start}{name}"


def on_valkey(store):
    return Tier(store, "chat-0123@", lambda key, value, ttl_s=7 * DAY_S: store.client.set(key, value, ex=ttl_s))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


@pytest.fixture(params=["valkey", pytest.param("valkey-tls", marks=needs_tls), "cluster", "fs", "s3", "bucket"])
def tier(request, tmp_path):
    if request.param == "valkey":
        return on_valkey(request.getfixturevalue("valkey"))
    if request.param == "valkey-tls":
        secure = request.getfixturevalue("secure")
        password = tmp_path / "password"
        password.write_text("first\n")
        commands = ["+strlen", "+pttl", "+expire", "+unlink", "+scan", "+info", "+set"]
        secure.admin.execute_command("ACL", "SETUSER", "warmfront", "reset", "on", ">first", "~*", *commands)
        who = PasswordFile("warmfront", password)
        return on_valkey(ValkeyStore(ValkeyAccess(secure.url, who, secure.certificates.ca)))
    if request.param == "cluster":
        return on_valkey(ValkeyStore(ValkeyAccess(request.getfixturevalue("nodes").url, cluster=True)))
    if request.param == "fs":
        (tmp_path / "kv" / "chat-0123").mkdir(parents=True)
        (tmp_path / "kv" / "other-0123").mkdir(parents=True)
        store = FileStore(tmp_path / "kv", 7 * DAY_S)
        return Tier(store, "chat-0123/", lambda key, value: (store.directory / key).write_bytes(value))
    if request.param == "bucket":
        stack = request.getfixturevalue("stack")
        with stack.processes.locked():
            store = S3Store("warmfront-kv", 7, stack.ensure_bucket())
    else:
        store = S3Store(request.getfixturevalue("s3_uri").split("/")[2], 7)
    start = "/models/chat-0123@"
    return Tier(store, start, lambda key, value: store.client.put_object(Bucket=store.bucket, Key=key, Body=value))


@pytest.fixture(autouse=True)
def clean(tier):
    yield
    for start in (tier.start, tier.start.replace("chat", "other")):
        for batch in tier.store.names(start):
            tier.store.delete(batch)


def test_sizes_say_what_is_there(tier):
    keys = [tier.key(n) for n in range(6)]
    for n in (1, 2, 4):
        tier.put(keys[n], b"x" * n)
    assert tier.store.sizes(keys).tolist() == [-1, 1, 2, -1, 4, -1]
    assert tier.store.sizes([]).tolist() == []
    assert tier.store.sizes(keys).dtype == np.int64


def test_what_is_deleted_is_gone_and_deleting_again_does_no_harm(tier):
    keys = [tier.key(n) for n in range(4)]
    for key in keys[:3]:
        tier.put(key, b"x")
    tier.store.delete(keys[1:])
    tier.store.delete(keys[1:])
    tier.store.delete([])
    assert tier.store.sizes(keys).tolist() == [1, -1, -1, -1]


def test_a_life_is_what_is_left_and_is_extended(tier):
    keys = [tier.key(n) for n in range(3)]
    for key in keys[:2]:
        tier.put(key, b"x")
    there, _, absent = tier.store.lives(keys).tolist()
    assert absent == -1
    assert 7 * DAY_S - 120 < there <= 7 * DAY_S
    before = tier.store.lives(keys[:1])[0]
    time.sleep(1.1)  # times of objects are whole seconds
    tier.store.extend(keys, np.array([7 * DAY_S, 7 * DAY_S - 60, 60]))
    after = tier.store.lives(keys).tolist()
    assert after[0] > before - 1.0
    assert 7 * DAY_S - 65 < after[1] <= 7 * DAY_S
    assert after[2] == -1


def test_a_namespace_is_listed_whole_and_alone(tier):
    other = tier.start.replace("chat", "other")
    own = [tier.key(n) for n in range(1_100)]
    for key in [*own, tier.key(1, other)]:
        tier.put(key, b"x")
    found = [key for batch in tier.store.names(tier.start) for key in batch]
    assert sorted(found) == sorted(own)
    assert [key for batch in tier.store.names("none" + tier.start) for key in batch] == []
    assert (tier.store.sizes(own) == 1).all()  # many at once, which S3 lists


def test_it_says_how_full_it_is(tier):
    usage = tier.store.usage()
    assert usage.used_bytes is None or usage.used_bytes > 0
    assert usage.capacity_bytes is None or usage.capacity_bytes >= (usage.used_bytes or 0)


def test_a_writable_one_is_left_as_it_was(tier):
    tier.store.require_writable(tier.start)
    assert [key for batch in tier.store.names(tier.start) for key in batch] == []
