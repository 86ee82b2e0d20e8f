import os
import signal
import sys
import time
from pathlib import Path

import pytest

from resources.local_stack import LocalStack
from resources.proc import ignores, start_ticks
from resources.processes import GRACE_S, Processes
from warmers.errors import ProcessDied, StoreUnavailable

PARENT = """
import subprocess, sys, time
from multiprocessing import shared_memory
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
memory = shared_memory.SharedMemory(name=sys.argv[1], create=True, size=4096)
print(child.pid, flush=True)
time.sleep(600)
"""


def alive(pid):
    return start_ticks(pid) is not None


def wait_for(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def processes(tmp_path):
    processes = Processes(tmp_path)
    yield processes
    for name in processes.names():
        processes.stop(name)


@pytest.mark.parametrize("crash", [None, signal.SIGKILL])
def test_stop_ends_children_and_shared_memory_even_after_a_crash(processes, crash):
    shm = f"wf-test-{os.getpid()}-{time.time_ns()}"
    started = processes.start("p", [sys.executable, "-c", PARENT, shm], url="", spec="", shm=shm)
    wait_for(lambda: processes.log("p").read_text().strip())
    child = int(processes.log("p").read_text())
    if crash:
        os.kill(started.pid, crash)
        os.waitpid(started.pid, 0)
        assert processes.running("p") is None
        assert alive(child)
    assert processes.stop("p")
    assert not alive(child)
    assert not list(Path("/dev/shm").glob(f"*{shm}*"))
    assert processes.names() == []
    assert not processes.stop("p")


def test_a_process_that_dies_shows_the_end_of_its_log(processes):
    processes.start("p", [sys.executable, "-c", "print('what went wrong'); raise SystemExit(3)"], url="", spec="")
    with pytest.raises(ProcessDied, match=r"(?s)it ended after.*what went wrong"):
        processes.wait("p", lambda: False, 30, lambda _: None)


def test_one_that_was_started_deaf_to_interrupts_is_ended_at_once(processes):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for its background jobs
    try:
        started = processes.start("p", ["sleep", "600"], url="", spec="")
    finally:
        signal.signal(signal.SIGINT, before)
    assert ignores(started.pid, signal.SIGINT)
    began = time.monotonic()
    assert processes.stop("p")
    assert not alive(started.pid)
    assert time.monotonic() - began < GRACE_S / 2


def test_a_reused_pid_is_not_ours(processes, tmp_path):
    started = processes.start("p", [sys.executable, "-c", "import time; time.sleep(600)"], url="", spec="")
    record = tmp_path / "p.json"
    text = record.read_text()
    record.write_text(text.replace(f'"ticks": {started.ticks}', f'"ticks": {started.ticks - 1}'))
    assert processes.running("p") is None
    processes.stop("p")
    assert alive(started.pid)
    record.write_text(text)
    processes.stop("p")
    assert not alive(started.pid)


def test_data_outlives_the_servers_and_a_second_start_changes_nothing(tmp_path):
    import boto3

    from resources.valkey_store import ValkeyStore

    stack = LocalStack(tmp_path, on_event=lambda _: None)

    def s3():
        url = stack.processes.running("s3").url
        keys = {"aws_access_key_id": "x", "aws_secret_access_key": "x", "region_name": "us-east-1"}
        return boto3.client("s3", endpoint_url=url, **keys)

    try:
        url = stack.ensure()
        assert stack.ensure() == url
        assert [s.state for s in stack.status()] == ["running", "running", "stopped", "stopped"]
        ValkeyStore.at(url).client.set("key", b"value")
        s3().create_bucket(Bucket="bucket")
        s3().put_object(Bucket="bucket", Key="a/b", Body=b"kept")
        assert sorted(stack.down()) == ["s3", "valkey"]
        with pytest.raises(StoreUnavailable, match="warmfront up"):
            stack.valkey_url()
        assert ValkeyStore.at(stack.ensure()).client.get("key") == b"value"
        assert s3().get_object(Bucket="bucket", Key="a/b")["Body"].read() == b"kept"
        os.kill(stack.processes.running("valkey").pid, signal.SIGKILL)
        wait_for(lambda: stack.status()[0].state == "died")
        assert ValkeyStore.at(stack.ensure()).ping()
    finally:
        stack.down()
    assert stack.down() == []
