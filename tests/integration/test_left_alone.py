"""`dagster dev` left alone with a folder of templates: its daemon, ticks, queue and run processes; a fake engine."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import dagster as dg
import pytest
from fakes import FakedWorkspace

from pipelines.runs import open_instance
from resources.processes import free_port

TESTS = Path(__file__).parents[1]
RULE = "You help customers with what they ordered, and you are kind to them. "


class Left:
    """The instance that `dagster dev` works on, looked at from outside."""

    def __init__(self, workspace, instance):
        self.workspace, self.instance = workspace, instance

    def runs(self):
        """How many, by job and status."""
        return Counter((run.job_name, run.status.value) for run in self.instance.get_runs())

    def wait(self, **finished):
        """Until exactly so many runs of each job have succeeded, and nothing else is there."""
        expected = Counter({(job, "SUCCESS"): count for job, count in finished.items()})
        deadline = time.monotonic() + 120
        while (seen := self.runs()) != expected:
            assert time.monotonic() < deadline, (seen, expected)
            time.sleep(0.5)

    def readable(self):
        key = dg.AssetCheckKey(dg.AssetKey("prompt_templates"), "templates_are_readable")
        (record,) = self.instance.event_log_storage.get_asset_check_execution_history(key, limit=1)
        return record.event.asset_check_evaluation

    def labels(self):
        return sorted(prefix.label for prefix in self.workspace.state.prefixes("chat").found)

    def proven(self):
        proof, latest = self.workspace.state.document("chat", "proof"), self.workspace.state.latest("chat", "proof")
        now = self.workspace.prompts("chat").read().digest
        return proof["verdict"] == "proven" and latest["templates"] == now


@pytest.fixture
def left(workspace_file, tmp_path, monkeypatch):
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    workspace = FakedWorkspace(workspace_file, on_event=lambda _: None)
    with open_instance(workspace) as instance:
        home = workspace.local_directory / "dagster"
        env = {
            **os.environ,
            "DAGSTER_HOME": str(home),
            "WARMFRONT_CONFIG": str(workspace_file),
            "PYTHONPATH": str(TESTS),
        }
        argv = [sys.executable, "-m", "dagster", "dev", "-m", "faked_definitions", "-h", "127.0.0.1"]
        with (tmp_path / "dev.log").open("wb") as log:
            dev = subprocess.Popen(
                [*argv, "-p", str(free_port())], env=env, stdout=log, stderr=log, cwd=tmp_path, start_new_session=True
            )
            yield Left(workspace, instance)
            os.killpg(dev.pid, signal.SIGTERM)
            try:
                dev.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(dev.pid, signal.SIGKILL)
                dev.wait()


def test_editing_adding_breaking_deleting_and_reverting_leads_to_exactly_the_right_runs(left, workspace_file):
    prompts = workspace_file.parent / "prompts"
    left.wait(warm=1)
    assert left.proven()

    original = (prompts / "support.md").read_text()
    (prompts / "support.md").write_text(original + RULE)
    left.wait(warm=2)
    assert left.proven()

    (prompts / "added.yaml").write_text(f"messages: [{{role: system, content: '{RULE * 2}'}}]")
    left.wait(warm=3)
    assert "added" in left.labels()

    (prompts / "added.yaml").write_text("messages: [")
    left.wait(warm=3, read_templates=1)
    assert not left.readable().passed
    assert "added.yaml" in left.readable().description

    (prompts / "sales.md").unlink()
    left.wait(warm=4, read_templates=1)
    assert left.labels() == ["added", "short", "support"]

    (prompts / "added.yaml").write_text(f"messages: [{{role: system, content: '{RULE * 2}'}}]")
    left.wait(warm=4, read_templates=2)
    assert left.readable().passed

    (prompts / "support.md").write_text(original)
    left.wait(warm=5, read_templates=2)
    assert left.proven()
    assert left.labels() == ["added", "short", "support"]

    (prompts / "added.yaml").write_text("")  # and no later tick asked for anything but this
    left.wait(warm=5, read_templates=3)
