"""Runs that are killed at every step, interrupted, or not alone: processes of their own on real Valkey and state."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest
from fakes import CHUNK, FakedWorkspace

from pipelines.definitions import build_defs

CLI = Path(__file__).parents[1] / "faked_cli.py"
KILLED = -signal.SIGKILL


class Host:
    """A fleet whose command line runs in processes of their own."""

    def __init__(self, workspace_file):
        self.workspace = FakedWorkspace(workspace_file, on_event=lambda _: None)
        self.home = workspace_file.parent / "state" / "dagster"
        self.env = {**os.environ, "WARMFRONT_CONFIG": str(workspace_file), "PYTHONPATH": str(CLI.parent)}

    def start(self, die=""):
        env = {**self.env, "WARMFRONT_TEST_DIE": die}
        argv = [sys.executable, CLI, "warm", "--fleet", "chat", "--json"]
        return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def end(self, process):
        """Exit code, and the document on stdout."""
        out, err = process.communicate(timeout=120)
        return process.returncode, json.loads(out) if out.strip() else None, err

    def warm(self, die=""):
        return self.end(self.start(die))

    def chunks(self):
        client = self.workspace.store("chat").client
        names = client.scan_iter(f"{self.workspace.fleet('chat').namespace}@*")
        return {name for name in names if b"warmfront-control" not in name}

    def runs(self):
        with dg.DagsterInstance.from_config(str(self.home)) as instance:
            return [run.status.value for run in instance.get_runs()]


@pytest.fixture
def host(workspace_file):
    for number in range(6):
        text = f"You are assistant number {number}, and you help with what number {number} is for. "
        (workspace_file.parent / "prompts" / f"more_{number}.md").write_text(text)
    return Host(workspace_file)


@pytest.mark.parametrize(
    "place",
    [
        *("before prefixes", "after prefixes", "before plan", "after plan", "in prefill 1", "in prefill 2"),
        *("before record", "after record", "before warm", "after warm", "in proof 1", "in proof 4"),
        *("before proof", "after proof"),
    ],
)
def test_a_run_killed_anywhere_is_taken_up_by_the_next_one(host, place):
    code, document, err = host.warm(f"SIGKILL {place}")
    assert (code, document) == (KILLED, None), err
    before = host.chunks()
    code, document, err = host.warm()
    assert (code, document["verdict"]) == (0, "proven"), err
    assert document["warm"]["computed_tokens"] == (len(host.chunks()) - len(before)) * CHUNK
    assert before <= host.chunks()
    assert host.runs() == ["SUCCESS", "FAILURE"]  # newest first: the dead one was ended
    rows = host.workspace.state.journal(host.workspace.fleet("chat").namespace).rows()
    assert len(rows) == len(host.chunks())
    assert (rows.proven_at > 0).all()


@pytest.mark.parametrize("place", ["after prefixes", "in prefill 2", "in proof 2"])
def test_an_interrupt_records_what_is_done_and_gives_the_lease_back(host, place):
    code, document, err = host.warm(f"SIGINT {place}")
    assert (code, document["exit_code"]) == (130, 130), err
    namespace = host.workspace.fleet("chat").namespace
    found = host.workspace.state.objects.read(f"namespaces/{namespace}/lease.json")
    assert found is None or json.loads(found[0])["expires_at"] == 0
    before = host.chunks()
    assert len(host.workspace.state.journal(namespace).rows()) == len(before)
    code, document, err = host.warm()
    assert (code, document["verdict"]) == (0, "proven"), err
    assert document["warm"]["computed_tokens"] == (len(host.chunks()) - len(before)) * CHUNK
    assert "FAILURE" in host.runs()


def test_of_two_command_lines_one_warms_and_the_other_says_who_does(host):
    one, other = host.start("SLOW"), host.start("SLOW")
    ended = sorted((host.end(one), host.end(other)), key=lambda end: end[0])
    assert [code for code, _, _ in ended] == [0, 1], [err for _, _, err in ended]
    assert ended[1][1] is not None, ended[1][2]
    assert "holds it for" in " ".join(ended[1][1]["reasons"])
    assert ended[0][1]["warm"]["computed_tokens"] == len(host.chunks()) * CHUNK


def test_of_the_command_line_and_a_run_of_the_instance_one_warms(host):
    process = host.start("SLOW")
    for line in process.stderr:  # its own progress, written under the lease
        if "chunks" in line:
            break
    with dg.DagsterInstance.from_config(str(host.home)) as instance:
        job = build_defs(host.workspace).resolve_job_def("warm")
        result = job.execute_in_process(partition_key="chat", instance=instance, raise_on_error=False)
    code, document, err = host.end(process)
    assert (code, document["verdict"]) == (0, "proven"), err
    assert not result.success
    assert "holds it for" in result.failure_data_for_node("warm_chunks").user_failure_data.description
    assert document["warm"]["computed_tokens"] == len(host.chunks()) * CHUNK
    assert host.workspace.engine.prefills == []
