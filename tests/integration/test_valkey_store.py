"""What goes wrong with a Valkey, and what it is called: on real servers."""

import threading
import time
from contextlib import contextmanager

import pytest
from valkey_servers import Certificates, cluster, needs_tls, run, server

from resources.processes import free_port
from resources.valkey_access import ValkeyAccess
from resources.valkey_credentials import ElastiCacheToken, EnvironmentPassword, PasswordFile, presigned
from resources.valkey_store import ValkeyStore
from warmers.errors import ConfigError, StoreUnavailable


def test_many_batches(valkey):
    keys = [f"ns@m@{n}" for n in range(12_000)]
    pipeline = valkey.client.pipeline(transaction=False)
    for n, key in enumerate(keys):
        if n % 3:
            pipeline.set(key, b"x" * (n % 3))
    pipeline.execute()
    assert valkey.sizes(keys).tolist() == [n % 3 or -1 for n in range(12_000)]
    valkey.delete(keys)
    assert (valkey.sizes(keys) == -1).all()


def test_a_store_that_is_away_says_so():
    away = ValkeyStore.at("redis://127.0.0.1:1")
    assert not away.ping()
    with pytest.raises(StoreUnavailable, match=r"asking for sizes of 1 keys in Valkey at redis://127\.0\.0\.1:1"):
        away.sizes(["a"])


def test_a_password_comes_from_the_environment_and_shows_nowhere(monkeypatch, tmp_path):
    with server(tmp_path, None, "--requirepass", "hush-hush") as started:
        store = ValkeyStore(ValkeyAccess(started.url, EnvironmentPassword(None, "WF_TEST_PASSWORD")))
        with pytest.raises(ConfigError, match="WF_TEST_PASSWORD, which is not set"):
            store.sizes(["a"])
        monkeypatch.setenv("WF_TEST_PASSWORD", "hush-hash")
        with pytest.raises(ConfigError, match=r"WRONGPASS|invalid.*Correct l2.username and the password") as error:
            store.sizes(["a"])
        assert "hash" not in f"{error.value} {store!r}"
        monkeypatch.setenv("WF_TEST_PASSWORD", "hush-hush")
        assert store.sizes(["a"]).tolist() == [-1]
        assert "hush" not in repr(store)


def test_an_error_in_the_middle_and_a_cut_connection_leave_no_answer_behind(valkey):
    valkey.client.set("text", b"12345")
    valkey.client.rpush("list", 1, 2)
    with pytest.raises(StoreUnavailable, match="WRONGTYPE"):
        valkey.sizes(["absent", "list", "text", "text"])
    assert valkey.sizes(["text", "absent"]).tolist() == [5, -1]
    valkey.client.client_kill_filter(_type="normal", skipme=False)
    assert valkey.sizes(["absent", "text"]).tolist() == [-1, 5]
    valkey.delete(["text", "list", "absent"])
    assert valkey.client.exists("text", "list") == 0


@needs_tls
@pytest.mark.parametrize(
    ("names", "expired", "trusted"),
    [(("127.0.0.1",), False, False), (("elsewhere.example",), False, True), (("127.0.0.1",), True, True)],
    ids=["another CA", "another host", "expired"],
)
def test_a_certificate_that_proves_nothing_is_refused(tmp_path, certificates, names, expired, trusted):
    shown = Certificates.make(tmp_path / "shown", *names, expired=expired)
    with server(tmp_path / "server", shown) as started:
        ca = shown.ca if trusted else certificates.ca
        with pytest.raises(ConfigError, match=r"certificate verify failed.*Name its CA in l2.ca_file"):
            ValkeyStore(ValkeyAccess(started.url, ca_file=ca)).sizes(["a"])


@needs_tls
def test_a_password_that_is_rotated_while_connections_are_open(secure, tmp_path):
    password = tmp_path / "password"
    password.write_text("first")
    secure.admin.execute_command("ACL", "SETUSER", "cache", "reset", "on", ">first", "~*", "+@all")
    store = ValkeyStore(ValkeyAccess(secure.url, PasswordFile("cache", password), secure.certificates.ca))
    assert store.sizes(["a"]).tolist() == [-1]
    for new, old in (("second", "first"), ("third", "second")):
        secure.admin.execute_command("ACL", "SETUSER", "cache", f">{new}")
        password.write_text(f"{new}\n")
        secure.admin.execute_command("ACL", "SETUSER", "cache", f"<{old}")
        secure.admin.execute_command("CLIENT", "KILL", "USER", "cache")  # as ElastiCache does after 12 hours
        assert store.sizes(["a"]).tolist() == [-1]
    password.unlink()
    secure.admin.execute_command("CLIENT", "KILL", "USER", "cache")
    with pytest.raises(ConfigError, match=r"l2.password_file .* cannot be read: No such file"):
        store.sizes(["a"])


def test_a_user_without_a_permission(tmp_path):
    with server(tmp_path) as started:
        started.admin.execute_command("ACL", "SETUSER", "reader", "on", "nopass", "~*", "+strlen", "+scan")
        store = ValkeyStore(ValkeyAccess(started.url, _Named("reader")))
        assert store.sizes(["a"]).tolist() == [-1]
        with pytest.raises(ConfigError, match=r"NoPermissionError.*Give the user the commands"):
            store.delete(["a"])


class _Named:
    def __init__(self, name):
        self.name = name

    def get_credentials(self):
        return (self.name, "any")


def test_a_reader_and_a_full_one_take_nothing(tmp_path):
    with server(tmp_path / "primary") as primary:
        replica = ["--replicaof", f"127.0.0.1 {primary.port}"]
        with server(tmp_path / "reader", None, *replica) as reader:
            store = ValkeyStore.at(reader.url)
            with pytest.raises(StoreUnavailable, match=r"ReadOnlyError.*Name the primary's endpoint"):
                store.require_writable("ns@")
    with server(tmp_path / "full", None, "--maxmemory", "1mb", "--maxmemory-policy", "noeviction") as full:
        store = ValkeyStore.at(full.url)
        with pytest.raises(StoreUnavailable, match=r"OutOfMemoryError.*Give it more memory"):
            store.require_writable("ns@")
        usage = store.usage()
        assert (usage.capacity_bytes, usage.eviction_policy) == (1 << 20, "noeviction")


@contextmanager
def stalled(started):
    """It takes commands, and answers none."""
    pid = started.processes.running("valkey").pid
    import os
    import signal

    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_one_that_does_not_answer_is_given_up_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr("resources.valkey_access.TIMEOUT_S", 0.2)
    with server(tmp_path) as started:
        store = ValkeyStore.at(started.url)
        store.client.set("a", b"x")
        with stalled(started), pytest.raises(StoreUnavailable, match="Timeout"):
            store.sizes(["a"])
        assert store.sizes(["a"]).tolist() == [1]


def test_one_that_comes_back_is_used_again(tmp_path):
    port = free_port()
    started = run(tmp_path, port)
    store = ValkeyStore.at(started.url)
    assert store.sizes(["a"]).tolist() == [-1]
    started.stop()
    with pytest.raises(StoreUnavailable, match="asking for sizes of 1 keys"):
        store.sizes(["a"])
    again = run(tmp_path, port)
    try:
        assert store.sizes(["a"]).tolist() == [-1]
    finally:
        again.stop()


def test_a_slot_that_moves_while_it_is_asked_for(tmp_path):
    with cluster(tmp_path) as nodes:
        store = ValkeyStore(ValkeyAccess(nodes.url, cluster=True))
        keys = [f"ns@m@{n}" for n in range(3_000)]
        for key in keys:
            store.client.set(key, b"xy")
        stop, seen = threading.Event(), []

        def ask():
            while not stop.is_set():
                seen.append((store.sizes(keys) == 2).all())

        asking = threading.Thread(target=ask)
        asking.start()
        owners = ValkeyStore(ValkeyAccess(nodes.url, cluster=True)).client.nodes_manager
        slots = sorted({store.client.keyslot(key) for key in keys[:40]})
        try:
            for slot in slots:
                port = owners.get_node_from_slot(slot).port
                source = next(n for n, each in enumerate(nodes.nodes) if each.port == port)
                nodes.move(slot, source, (source + 1) % 3)
        finally:
            stop.set()
            asking.join()
        assert len(seen) > 3
        assert all(seen)


def test_a_node_of_a_cluster_that_is_gone(tmp_path):
    with cluster(tmp_path, None, "--cluster-require-full-coverage", "no") as nodes:
        store = ValkeyStore(ValkeyAccess(nodes.url, cluster=True))
        assert (store.sizes([f"ns@{n}" for n in range(50)]) == -1).all()
        nodes.nodes[2].stop()
        with pytest.raises(StoreUnavailable, match="asking for sizes of 50 keys in Valkey"):
            store.sizes([f"ns@{n}" for n in range(50)])


@pytest.mark.parametrize("serverless", [True, False])
def test_an_iam_token_is_what_botocore_signs(serverless, monkeypatch):
    import datetime

    import botocore.auth
    import botocore.session
    from botocore.credentials import Credentials
    from botocore.model import ServiceId
    from botocore.signers import RequestSigner

    moment = datetime.datetime(2026, 12, 1, 12, 0, tzinfo=datetime.UTC)
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *_, **__: moment.replace(tzinfo=None))
    credentials = Credentials("AKID", "SECRET", "SESSION")
    user = ElastiCacheToken("warmfront", "kv-cache", "eu-central-1", serverless)
    token = presigned(user, credentials)
    events = botocore.session.get_session().get_component("event_emitter")
    signer = RequestSigner(ServiceId("elasticache"), "eu-central-1", "elasticache", "v4", credentials, events)
    query = "Action=connect&User=warmfront" + ("&ResourceType=ServerlessCache" if serverless else "")
    request = {"method": "GET", "url": f"https://kv-cache/?{query}", "body": {}, "headers": {}, "context": {}}
    signed = signer.generate_presigned_url(request, "connect", expires_in=900, region_name="eu-central-1")
    assert token == signed.removeprefix("https://")
    assert "X-Amz-Expires=900" in token


def test_a_token_is_made_anew_before_it_ends_and_not_each_time(monkeypatch):
    for name, value in {"AWS_ACCESS_KEY_ID": "AKID", "AWS_SECRET_ACCESS_KEY": "SECRET"}.items():
        monkeypatch.setenv(name, value)
    made, now = [], [1_000.0]
    monkeypatch.setattr("resources.valkey_credentials.presigned", lambda *_: made.append(1) or f"token-{len(made)}")
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    user = ElastiCacheToken("warmfront", "kv-cache", "eu-central-1", True)
    assert [user.get_credentials() for _ in range(3)] == [("warmfront", "token-1")] * 3
    now[0] += 601
    assert user.get_credentials() == ("warmfront", "token-2")
    assert "token" not in repr(user)
