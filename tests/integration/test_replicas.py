"""Who may end an engine that gives no answer, and who may not. Real processes and locks; no engine in them."""

import sys
from pathlib import Path

import pytest

from resources.local_stack import LocalStack
from resources.replica_commands import LocalWeights
from resources.replicas import LocalReplicas
from resources.settings import LocalSettings, ValkeySettings
from resources.tiers import open_tier
from warmers.errors import EngineLost, EngineRefused, EngineUnavailable


class Attached(LocalReplicas):
    """Hands out what runs, whatever it is."""

    def _require_engine(self):
        pass

    def _attach(self, fleet, address, *, fresh=False):
        return type("Replica", (), {"close": lambda self: None})()


@pytest.fixture
def replicas(tmp_path):
    said = []
    stack = LocalStack(tmp_path, on_event=said.append)
    tier = open_tier(ValkeySettings(url="redis://127.0.0.1:1"), stack)
    replicas = Attached(stack, LocalSettings(), LocalWeights(Path("model")), tier, on_event=said.append)
    object.__setattr__(replicas, "said", said)
    for name in ("engine", "daemon"):
        replicas.processes.start(name, [sys.executable, "-c", "import time; time.sleep(600)"], url="", spec="")
    yield replicas
    for name in replicas.processes.names():
        replicas.processes.stop(name)


def fail(replicas, error):
    with replicas.warmer(None):
        raise error("prefilling", seen="nothing good", do="Try again.")


def test_an_engine_that_gives_no_answer_is_ended_with_its_daemon(replicas):
    with pytest.raises(EngineLost):
        fail(replicas, EngineLost)
    assert replicas.processes.names() == []


@pytest.mark.parametrize("error", [EngineUnavailable, EngineRefused])
def test_one_that_answers_is_left_alone_whatever_it_says(replicas, error):
    with pytest.raises(error):
        fail(replicas, error)
    assert replicas.processes.names() == ["daemon", "engine"]


def test_one_that_another_run_uses_is_left_to_that_run(replicas):
    with replicas.warmer(None):
        with pytest.raises(EngineLost):
            fail(replicas, EngineLost)
        assert replicas.processes.names() == ["daemon", "engine"]
        assert "leaving it to the other run" in replicas.said[-1]
    with pytest.raises(EngineLost):
        fail(replicas, EngineLost)
    assert replicas.processes.names() == []
