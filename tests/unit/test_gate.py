from dataclasses import replace

import numpy as np
import pytest
from fakes import CHUNK, FakeClock, make_fleet, make_prefix, words

from warmers.errors import EngineUnavailable, StateUnavailable
from warmers.gate import REFRESH_S, Gate, GateLimits
from warmers.hot_set import HotSet
from warmers.prefetch import SHARE
from warmers.prefixes import Usage

FLEET = make_fleet(adapters={"sql": "1"})
ROOMY = GateLimits(l0_tokens=1_000)


class Pod:
    """An engine, its daemon and the state store, as a gate sees them. Not real ones."""

    def __init__(self, *texts):
        self.up, self.registered, self.connected, self.state_up = True, True, True, True
        self.hot = (
            HotSet.of(FLEET, [make_prefix(words(text), text, weight=len(text)) for text in texts]) if texts else None
        )
        self.version, self.l2, self.l1, self.l0 = 1, set(texts), set(), set()
        self.chunks_in_l1, self.requests, self.submitted = 1_000, [], []

    # The engine
    def healthy(self):
        return self.up

    def prefill(self, ids, salt, adapter=None):
        (prefix,) = [p for p in self.hot.prefixes if np.array_equal(p.ids, ids[:-1]) and p.adapter == adapter]
        self.requests.append(prefix.label)
        hit = prefix.label in self.l0 or (self.connected and prefix.label in self.l1)
        self.l0.add(prefix.label)
        return Usage(len(ids), len(prefix.ids) if hit else 0)

    # The daemon
    def l1_bytes(self):
        return int(self.chunks_in_l1 * FLEET.chunk_bytes / SHARE) + 1

    def prefetch(self, hot, prefix):
        if not self.registered:
            raise EngineUnavailable("POST /cache/prefetches", seen="HTTP 503: no layout registered", do="Wait.")
        self.submitted.append(prefix.label)
        return prefix.label

    def prefetched(self, request):
        (prefix,) = [p for p in self.hot.prefixes if p.label == request]
        keys = len(prefix.ids) // CHUNK
        self.l1 |= {request} & self.l2
        return (keys if request in self.l1 else keys - 1), keys

    # The hot set
    def read(self, known):
        if not self.state_up:
            raise StateUnavailable("reading the hot set", seen="no route to host", do="Wait.")
        return None if self.hot is None or known == str(self.version) else (self.hot, str(self.version))


class Watch:
    """A gate beside a pod, and every state that it showed."""

    def __init__(self, pod, limits=ROOMY):
        self.pod, self.clock, self.shown = pod, FakeClock(), []
        self.gate = Gate(pod, pod, pod, self.clock, limits, self.shown.append)

    def steps(self, seconds=1):
        for _ in range(seconds):
            self.gate.step()
            self.clock.time += 1.0
        return self.gate.status


def test_it_opens_when_all_is_loaded_replayed_and_probed_and_not_before():
    watch = Watch(Pod("abc", "de"))
    status = watch.steps()
    assert (status.state, status.open, status.cold, status.reason) == ("warm", True, False, "")
    assert [s.state for s in watch.shown if not s.open][-1] == "probing"
    assert (status.loaded_tokens, status.replayed_tokens) == (5 * CHUNK, 5 * CHUNK)
    assert watch.pod.requests == ["abc", "de", "abc"]
    assert status.seconds_to_warm < 1.0


@pytest.mark.parametrize(
    ("trouble", "says"),
    [
        ({"up": False}, "the engine takes no requests"),
        ({"registered": False}, "no layout registered"),
        ({"hot": None}, "there is no hot set yet"),
        ({"l2": {"abc"}}, "de has 1 of 2 keys: warm this namespace again"),
        ({"state_up": False}, "no route to host"),
    ],
)
def test_it_stays_closed_and_says_why_and_opens_once_that_is_over(trouble, says):
    pod, good = Pod("abc", "de"), Pod("abc", "de")
    pod.__dict__.update(trouble)
    watch = Watch(pod)
    status = watch.steps(5)
    assert (status.state, status.open) == ("waiting", False)
    assert says in status.reason
    pod.__dict__.update({name: getattr(good, name) for name in trouble})
    assert watch.steps(int(REFRESH_S)).open


def test_a_replay_that_was_computed_after_all_is_counted_and_does_not_open_the_gate_by_itself():
    pod = Pod("abc", "de")
    pod.connected = False
    watch = Watch(pod)
    status = watch.steps()
    assert not status.open
    assert "the engine computed abc: 0 of 48 tokens came from a cache" in status.reason
    status = watch.steps(20)  # by then all of it is in L0, where the probe finds it
    assert (status.open, status.computed_tokens) == (True, 5 * CHUNK)


def test_a_gate_of_a_pod_that_nobody_rolls_out_opens_cold_says_so_and_warms_later():
    pod = Pod("abc", "de")
    pod.l2 = {"abc"}
    watch = Watch(pod, replace(ROOMY, opens_cold_after_s=10.0))
    assert not watch.steps(9).open
    cold = watch.steps(3)
    assert (cold.open, cold.cold, cold.cold_opens) == (True, True, 1)
    assert "warm this namespace again" in cold.reason
    pod.l2 = {"abc", "de"}
    warm = watch.steps(int(REFRESH_S))
    assert (warm.state, warm.open, warm.cold, warm.cold_opens) == ("warm", True, False, 1)


def test_it_never_opens_beside_an_engine_that_is_not_there():
    pod = Pod("abc")
    pod.up = False
    assert not Watch(pod, replace(ROOMY, opens_cold_after_s=1.0)).steps(30).open


def test_another_hot_set_is_loaded_without_closing():
    pod = Pod("abc")
    watch = Watch(pod)
    assert watch.steps().open
    shown = len(watch.shown)
    pod.hot, pod.version, pod.l2 = Pod("abc", "xyzw").hot, 2, {"abc", "xyzw"}
    status = watch.steps()
    assert (status.version, status.loaded_tokens) == ("2", 7 * CHUNK)
    assert "xyzw" in pod.l0
    assert all(s.open for s in watch.shown[shown:])


def test_what_a_restarted_daemon_has_lost_is_loaded_again_and_an_open_gate_stays_open():
    pod = Pod("abc")
    watch = Watch(pod)
    watch.steps()
    pod.l1.clear()
    watch.steps(int(REFRESH_S) + 2)
    assert pod.l1 == {"abc"}
    pod.registered = False
    status = watch.steps(int(REFRESH_S) + 2)
    assert (status.state, status.open) == ("waiting", True)
    pod.registered = True
    assert watch.steps(int(REFRESH_S) + 2).state == "warm"
    assert pod.requests == ["abc", "abc"], "L0 was not lost"


def test_an_engine_that_was_restarted_gets_its_l0_again():
    pod = Pod("abc")
    watch = Watch(pod)
    watch.steps()
    pod.up = False
    watch.steps()
    pod.up, pod.l0 = True, set()
    watch.steps()
    assert pod.l0 == {"abc"}


def test_a_store_that_lacks_something_is_not_asked_every_second():
    pod = Pod("abc")
    pod.l2 = set()
    Watch(pod).steps(120)
    assert 6 < len(pod.submitted) < 20  # each time twice


def test_a_state_that_is_away_stops_no_gate_that_has_its_hot_set():
    pod = Pod("abc")
    watch = Watch(pod)
    watch.steps()
    pod.state_up = False
    assert watch.steps(3).state == "warm"


def test_l1_and_l0_hold_the_hottest_that_there_is_room_for():
    pod = Pod("abcde", "fgh", "ij")
    pod.chunks_in_l1 = 8
    status = Watch(pod, GateLimits(l0_tokens=6 * CHUNK)).steps()
    assert (status.open, status.left_out) == (True, 1)
    assert (status.loaded_tokens, status.replayed_tokens) == (8 * CHUNK, 5 * CHUNK)
    assert pod.requests == ["abcde", "abcde"]


def test_a_hot_set_without_a_prefix_keeps_nobody_waiting():
    pod = Pod("abc")
    pod.hot = replace(pod.hot, prefixes=())
    assert Watch(pod).steps().open
