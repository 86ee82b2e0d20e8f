"""The gate as a program of its own beside a real engine and daemon: closed until the replica is warm, then open."""

import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from engine_environment import needs_engine

from resources.hot_sets import encode
from resources.processes import free_port
from warmers.hot_set import HotSet
from warmers.prefixes import PrefixSet
from warmers.warm import warm

pytestmark = [needs_engine, pytest.mark.fleet("chat")]

MEMORY_MB = 100
START_S = 5.0
"""On two cores that an engine uses as well; alone it takes half a second."""


@pytest.fixture(scope="module")
def served(host):
    """A warmed fleet's replica, as a serving pod has one, and the prefixes that it was warmed with."""
    fleet = host.fleet("chat")
    with host.replicas("chat").warmer(fleet) as replica:
        found = host.find_prefixes(fleet, host.templates(fleet), replica.engine)
        mine = PrefixSet(tuple(replace(prefix, salt="gate") for prefix in found.prefixes))
        plan = host.plan(fleet, mine)
        with host.lease(fleet.namespace) as fence:
            warm(plan, replica, host.store("chat"), host.state.journal(fleet.namespace), fence, host.clock)
        yield fleet, replica, mine.prefixes


class Program:
    """`warmfront-gate`, started."""

    def __init__(self, directory, replica, *more):
        self.port, self.log = free_port(), directory / "gate.log"
        self.hot_set = directory / "hot_set.json"
        argv = ["--hot-set", self.hot_set, "--engine", replica.engine.url, "--daemon", replica.daemon.url]
        argv += ["--model", "tiny", "--host", "127.0.0.1", "--port", self.port, *more]
        with self.log.open("wb") as log:
            whole = [sys.executable, "-m", "pipelines.gate", *map(str, argv)]
            self.process = subprocess.Popen(whole, stderr=log, start_new_session=True)

    def get(self, path):
        return httpx.get(f"http://127.0.0.1:{self.port}{path}", trust_env=False)

    def wait(self, so, seconds=30.0):
        """The status, once `so` of it."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                answer = self.get("/ready")
                if so(answer):
                    return answer.json()
            except httpx.TransportError:
                pass
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def put(self, hot):
        scratch = self.hot_set.with_suffix(".new")
        scratch.write_bytes(encode(hot))
        scratch.replace(self.hot_set)

    def peak_mb(self):
        return int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{self.process.pid}/status").read_text())[1]) / 1024

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(10)


@pytest.fixture
def gate(tmp_path, served):
    started = []

    def start(*more):
        started.append(Program(tmp_path, served[1], *more))
        return started[-1]

    yield start
    for program in started:
        assert program.stop() == 0


def test_it_opens_when_the_hot_set_is_loaded_and_replayed_without_a_prefill(served, gate):
    fleet, replica, prefixes = served
    replica.forget()
    began = time.monotonic()
    program = gate()
    program.wait(lambda answer: answer.status_code == 503)
    assert time.monotonic() - began < START_S
    closed = program.wait(lambda answer: "no hot set" in answer.json()["reason"])
    assert (closed["open"], program.get("/healthz").status_code) == (False, 200)
    before = replica.counters()
    program.put(HotSet.of(fleet, prefixes))
    status = program.wait(lambda answer: answer.status_code == 200)
    tokens = sum(prefix.full_tokens for prefix in prefixes)
    assert (status["state"], status["cold"], status["loaded_tokens"]) == ("warm", False, tokens)
    assert (status["replayed_tokens"], status["computed_tokens"]) == (tokens, 0)
    counted = replica.counters() - before
    assert counted.computed < len(prefixes) * 2 * fleet.engine.block_tokens, "what is behind the last whole block"
    assert program.peak_mb() < MEMORY_MB
    page = program.get("/metrics").text
    assert "warmfront_gate_open 1\n" in page
    assert f"warmfront_gate_loaded_tokens {tokens:g}\n" in page
    heaviest = max(prefixes, key=lambda prefix: prefix.weight)
    first = replica.generate(heaviest.rendered, max_tokens=1, salt=heaviest.salt or None)
    assert first.cached_tokens >= heaviest.full_tokens, "a user's first request finds all of it in L0"


def test_what_l2_lacks_keeps_it_closed_and_a_pod_that_nobody_rolls_out_opens_cold(served, gate):
    fleet, _, prefixes = served
    lost = HotSet.of(fleet, [replace(prefix, salt="nobody") for prefix in prefixes])
    program = gate("--opens-cold-after", "4")
    program.put(lost)
    closed = program.wait(lambda answer: "L2 lacks" in answer.json()["reason"])
    assert not closed["open"]
    cold = program.wait(lambda answer: answer.status_code == 200)
    assert (cold["cold"], cold["cold_opens"], cold["computed_tokens"]) == (True, 1, 0)
    program.put(HotSet.of(fleet, prefixes))
    warmed = program.wait(lambda answer: answer.json()["state"] == "warm")
    assert (warmed["open"], warmed["cold"], warmed["cold_opens"]) == (True, False, 1)
