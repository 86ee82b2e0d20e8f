"""The engine's side of Valkey, in the engine's environment, against real servers: what LMCache's own adapter has not.

No engine and no daemon: LMCache's adapters are driven as its controllers drive them.
"""

import time

import pytest
from engine_environment import needs_engine
from l2_adapters import adapter, builtin, plugin
from valkey_servers import Certificates, cluster, needs_tls, run, server

from resources.processes import free_port

pytestmark = needs_engine
NAMES = [f"chunk-{n}" for n in range(8)]
SIZE = 100_000


def refused(config, **env):
    """What it ends with, at its start."""
    with pytest.raises(EOFError) as error, adapter(config, **env):
        pass
    return str(error.value)


def fills(adapter):
    """What is loaded, by its last byte; 0 where it was not."""
    return adapter("load", names=NAMES, size=SIZE)["fill"]


def test_it_writes_what_lmcaches_own_adapter_reads_and_the_reverse(tmp_path):
    with server(tmp_path / "server") as started:
        own = builtin(started.port, ttl_seconds=600)
        with adapter(plugin(started.port, ttl_seconds=600)) as ours, adapter(own) as theirs:
            assert ours("store", names=NAMES[:4], size=SIZE, fill=7)["bytes"] == 4 * SIZE
            assert theirs("store", names=NAMES[4:6], size=SIZE, fill=9)["ok"]
            for each in (ours, theirs):
                assert each("lookup", names=NAMES)["found"] == [True] * 6 + [False] * 2
                assert fills(each) == [7] * 4 + [9] * 2 + [0] * 2
            assert all(590 < started.admin.ttl(key) <= 600 for key in started.admin.keys("ns@*"))
            ours("delete", names=NAMES[:1])
            assert theirs("lookup", names=NAMES[:2])["found"] == [False, True]
            assert ours("load", names=NAMES[1:3], size=SIZE + 1)["found"] == [False, False]


@needs_tls
def test_across_a_rotation_that_cuts_every_connection_each_load_is_a_full_hit(secure, tmp_path):
    password = tmp_path / "password"
    password.write_text("first")
    rules = ("resetchannels", "~ns@*", "+get", "+set", "+exists", "+unlink", "+ping")
    secure.admin.execute_command("ACL", "SETUSER", "engine", "reset", "on", ">first", *rules)
    known = {"ca_file": str(secure.certificates.ca), "username": "engine", "password_file": str(password)}
    with adapter(plugin(secure.port, tls=True, **known)) as ours:
        assert ours("store", names=NAMES, size=SIZE, fill=5)["ok"]
        for old, new in (("first", "second"), ("second", "third"), ("third", "fourth")):
            secure.admin.execute_command("ACL", "SETUSER", "engine", f">{new}")
            password.write_text(f"{new}\n")
            secure.admin.execute_command("ACL", "SETUSER", "engine", f"<{old}")
            assert secure.admin.execute_command("CLIENT", "KILL", "USER", "engine") > 0  # ElastiCache: after 12 hours
            for _ in range(10):
                assert fills(ours) == [5] * 8
        assert ours("status")["failures"] == 0


@needs_tls
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"password_env": "WF_WRONG"}, "invalid username-password pair"),
        ({"ca_file": None}, "certificate verify failed"),
        ({"password_env": "WF_UNSET"}, "WF_UNSET, which is not set"),
        ({"password": "x"}, "password unknown"),
        ({"password_file": "/x"}, "password_env and password_file exclude each other"),
    ],
)
def test_what_somebody_has_to_mend_is_said_at_start_without_a_secret(secure, wrong, says):
    secure.admin.execute_command("ACL", "SETUSER", "named", "reset", "on", ">right-secret", "~*", "+@all")
    known = {"ca_file": str(secure.certificates.ca), "username": "named", "password_env": "WF_RIGHT", "tls": True}
    said = refused(plugin(secure.port, **known | wrong), WF_RIGHT="right-secret", WF_WRONG="wrong-secret")
    assert says in said
    assert "-secret" not in said


@needs_tls
@pytest.mark.parametrize(
    ("names", "expired", "says"),
    [(("elsewhere.example",), False, "not valid for"), ((), True, "certificate has expired")],
)
def test_a_server_that_is_not_who_it_should_be_is_not_used(tmp_path, names, expired, says):
    certificates = Certificates.make(tmp_path / "certificates", *names, expired=expired)
    with server(tmp_path / "server", certificates) as started:
        assert says in refused(plugin(started.port, tls=True, ca_file=str(certificates.ca)))


def test_a_server_that_is_away_costs_a_miss_and_no_wait_and_is_found_again(tmp_path):
    port = free_port()
    with adapter(plugin(port, timeout_s=1.0)) as ours:
        assert ours("status")["reachable"] is False
        assert ours("lookup", names=NAMES)["found"] == [False] * 8
        started = run(tmp_path, port)
        try:
            _until(lambda: ours("store", names=NAMES, size=SIZE, fill=3)["ok"])
            assert fills(ours) == [3] * 8
            started.admin.execute_command("CLIENT", "PAUSE", 3000, "ALL")
            slow = [ours("load", names=NAMES, size=SIZE) for _ in range(5)]
            assert [each["found"] for each in slow] == [[False] * 8] * 5
            assert sum(each["seconds"] for each in slow) < 2.5  # one time-out of a second, not five, nor forty
            _until(lambda: fills(ours) == [3] * 8)
            started.admin.config_set("maxmemory", 1)
            assert ours("store", names=["other"], size=SIZE)["ok"] is False
            assert fills(ours) == [3] * 8  # it takes no more, and still gives
        finally:
            started.stop()


def test_a_primary_that_became_a_reader(tmp_path):
    with server(tmp_path / "server") as started, adapter(plugin(started.port)) as ours:
        assert ours("store", names=NAMES, size=SIZE, fill=3)["ok"]
        started.admin.execute_command("REPLICAOF", "127.0.0.1", free_port())
        assert ours("store", names=["other"], size=SIZE)["ok"] is False
        started.admin.execute_command("REPLICAOF", "NO", "ONE")
        assert ours("store", names=["other"], size=SIZE)["ok"]
        assert fills(ours) == [3] * 8


@needs_tls
def test_a_cluster_that_is_resharded_in_between(tmp_path, certificates):
    with cluster(tmp_path / "cluster", certificates) as nodes:
        known = {"tls": True, "cluster": True, "ca_file": str(certificates.ca)}
        with adapter(plugin(nodes.nodes[0].port, **known)) as ours:
            assert ours("store", names=NAMES, size=SIZE, fill=6)["ok"]
            held = [node.admin.execute_command("DBSIZE") for node in nodes.nodes]
            assert sum(held) == 8
            assert max(held) < 8
            (giver,) = [n for n, count in enumerate(held) if count == max(held)][:1]
            slot = nodes.nodes[giver].admin.execute_command(
                "CLUSTER KEYSLOT", nodes.nodes[giver].admin.execute_command("RANDOMKEY")
            )
            _move(nodes, slot, giver)
            assert ours("lookup", names=NAMES)["found"] == [True] * 8
            assert fills(ours) == [6] * 8


def _move(nodes, slot, giver):
    """By deleting nothing: the keys of a slot travel as MIGRATE sends them."""
    nodes.move(slot, giver, (giver + 1) % len(nodes.nodes))


def _until(so, seconds=15):
    deadline = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < deadline
        time.sleep(0.1)
