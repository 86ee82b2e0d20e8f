"""Rows of the fault matrix that need the real engine, the real daemon, and a real Valkey behind it."""

import os
import signal
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from engine_environment import needs_engine

from resources.processes import Started
from warmers.errors import EngineUnavailable, NotWarm, StoreUnavailable
from warmers.identity import require_match
from warmers.prefixes import PrefixSet
from warmers.warm import warm

pytestmark = [needs_engine, pytest.mark.fleet("chat")]


class Scene:
    """The shared replica, and prefixes under a salt of the test's own: nobody has warmed them yet."""

    def __init__(self, host, replica, salt):
        self.host, self.replica, self.fleet = host, replica, host.fleet("chat")
        found = host.find_prefixes(self.fleet, host.templates(self.fleet), replica.engine)
        wanted = [p for p in found.prefixes if p.label in ("one", "two")]
        self.prefixes = PrefixSet(tuple(replace(p, salt=salt) for p in wanted))
        self.limits = replace(self.fleet.limits, concurrency=1, visible_deadline_s=8.0)

    @property
    def valkey(self):
        return self.host.store("chat").client

    def plan(self):
        return self.host.plan(replace(self.fleet, limits=self.limits), self.prefixes)

    def warm(self, on_progress=lambda _: None, replica=None):
        journal, store = self.host.state.journal(self.fleet.namespace), self.host.store("chat")
        with self.host.lease(self.fleet.namespace) as fence:
            return warm(self.plan(), replica or self.replica, store, journal, fence, self.host.clock, on_progress)

    def converges(self):
        """The next run computes what is missing and no more; after it, nothing is."""
        left = self.plan()
        result = self.warm()
        assert result.computed_tokens <= left.compute_tokens
        assert self.plan().missing_chunks == 0

    def restart(self, name):
        """Kill a process of the stack, and start it again at once, as a supervisor would."""
        processes = self.host.stack.processes
        before = processes.recorded(name)
        argv = Path(f"/proc/{before.pid}/cmdline").read_text().rstrip("\0").split("\0")
        if name == "valkey":  # it writes its address over its command line
            data, port = processes.directory / "valkey", urlsplit(before.url).port
            argv = [
                os.readlink(f"/proc/{before.pid}/exe"),
                "--bind",
                "127.0.0.1",
                "--port",
                str(port),
                "--dir",
                str(data),
            ]
        os.kill(before.pid, signal.SIGKILL)
        with processes.locked():
            processes.start(name, argv, url=before.url, spec=before.spec, env=ENV, shm=before.shm)


ENV = {"LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0"}


@pytest.fixture
def scene(host, request):
    fleet = host.fleet("chat")
    with host.replicas("chat").warmer(fleet) as replica:
        yield Scene(host, replica, request.node.name[:60])


@contextmanager
def stopped(started: Started):
    """Every process of a session stands still: it is there, and does not answer."""
    members = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and _session(p) == started.pid]
    for pid in members:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in members:
            os.kill(pid, signal.SIGCONT)


def _session(process):
    try:
        return int((process / "stat").read_text().rpartition(") ")[2].split()[3])
    except OSError:
        return None


def test_a_hung_engine_is_given_up_and_its_work_done_by_the_next_run(scene):
    with closing(replace(scene.replica.engine, request_timeout_s=3.0)) as engine:
        impatient = replace(scene.replica, engine=engine)
        engine_processes = stopped(scene.host.stack.processes.recorded("engine"))
        with engine_processes, pytest.raises(EngineUnavailable, match=r"ReadTimeout.*waited 3 s"):
            scene.warm(replica=impatient)
    scene.converges()


def test_a_full_valkey_is_named_and_what_fitted_is_kept(scene):
    room = 5 * scene.fleet.chunk_bytes  # for some of nine; what clients are sending takes of it as well
    scene.valkey.config_set("maxmemory-policy", "noeviction")
    scene.valkey.config_set("maxmemory", scene.valkey.info("memory")["used_memory"] + room)
    try:
        with pytest.raises(NotWarm, match=r"cannot write to L2.*memory limit"):
            scene.warm()
        kept = scene.plan()
        assert 0 < kept.missing_chunks < len(kept.tree.hashes)
    finally:
        scene.valkey.config_set("maxmemory", 0)
        scene.valkey.config_set("maxmemory-policy", "volatile-lru")
    scene.converges()


def test_a_valkey_that_restarts_while_warming_costs_what_was_under_way(scene):
    struck = []

    def strike(progress):
        if not struck:
            struck.append(progress.chunks)
            scene.valkey.save()
            scene.restart("valkey")

    with suppress(NotWarm, StoreUnavailable):  # by what was under way just then
        scene.warm(strike)
    assert struck
    scene.converges()


def test_a_daemon_killed_and_restarted_at_once_costs_a_run_at_the_most(host):
    """In the middle of a store, which hangs vLLM: the run gives up, the engine is ended, the next run has a new one."""
    with host.replicas("chat").warmer(host.fleet("chat")) as replica:
        scene = Scene(host, replica, "daemon")
    fleet = replace(scene.fleet, limits=replace(scene.limits, request_timeout_s=15.0, visible_deadline_s=15.0))
    struck = []

    def strike(progress):
        if not struck:
            struck.append(progress.chunks)
            scene.restart("daemon")

    def run():
        with host.replicas("chat").warmer(fleet) as replica:
            require_match(fleet, replica.engine.identity(), replica.daemon_identity())
            scene.warm(strike, replica)

    with suppress(NotWarm, EngineUnavailable):
        run()
    assert struck
    run()
    assert scene.plan().missing_chunks == 0
