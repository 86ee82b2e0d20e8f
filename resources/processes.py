"""Processes of the local stack: started in sessions of their own, found again by later commands, ended whole.

Each is recorded in a file, so that any command can attach to it or clean up after a crash. What they run,
and in which order, does not belong here (`resources/replicas.py`, `resources/local_stack.py`). Linux only.
"""

import fcntl
import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from resources.proc import SHARED_MEMORY, ignores, session_of, shared_memory, start_ticks
from warmers.errors import ProcessDied

TAIL_LINES = 30
POLL_S = 0.25
LISTENING = range(20_000, 32_000)
PROGRESS_EVERY_S = 5.0
GRACE_S = 60.0
"""From SIGINT on, before it gets rougher; Valkey saves its data in it."""

OnEvent = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Started:
    """A process as it was started."""

    name: str
    pid: int
    ticks: int
    """Start time in clock ticks since boot: tells a reused pid from ours."""
    url: str
    spec: str
    """What it runs; another spec under the same name means a restart."""
    shm: str = ""
    """Prefix of shared-memory segments it makes."""


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes recorded in one directory."""

    directory: Path

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude other commands that start or stop processes here."""
        self.directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.directory / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    @contextmanager
    def in_use(self) -> Iterator["InUse"]:
        """Say that a process here is in use; who wants to replace it waits for the block to end."""
        self.directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.directory / ".in-use", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            yield InUse(handle)
        finally:
            os.close(handle)

    def log(self, name: str) -> Path:
        """Where its output goes."""
        return self.directory / f"{name}.log"

    def names(self) -> list[str]:
        """Every process that was started and not stopped."""
        return sorted(path.stem for path in self.directory.glob("*.json"))

    def recorded(self, name: str) -> Started | None:
        """The record of a process, whether or not it still runs."""
        try:
            return Started(**json.loads((self.directory / f"{name}.json").read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def running(self, name: str) -> Started | None:
        """The process, if it runs."""
        started = self.recorded(name)
        return started if started and start_ticks(started.pid) == started.ticks else None

    def start(
        self,
        name: str,
        argv: Sequence[str],
        *,
        url: str,
        spec: str,
        env: Mapping[str, str] | None = None,
        shm: str = "",
        nice: int = 0,
    ) -> Started:
        """Start it, detached; call under `locked`. What a crash left of an earlier one is ended first."""
        self.stop(name)
        with self.log(name).open("wb") as log:
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                cwd=self.directory,
                start_new_session=True,
            )
        child.returncode = 0  # it outlives this object, which would warn otherwise; _wait_gone reaps it
        _yield_to_others(child.pid, nice)
        started = Started(name, child.pid, start_ticks(child.pid) or 0, url, spec, shm)
        scratch = self.directory / f".{name}.json"
        scratch.write_text(json.dumps(asdict(started)))
        scratch.replace(self.directory / f"{name}.json")
        return started

    def wait(self, name: str, healthy: Callable[[], bool], timeout_s: float, on_event: OnEvent) -> None:
        """Wait until it is healthy. Raises ProcessDied with the end of its log."""
        if healthy():
            return
        began = told = time.monotonic()
        while not healthy():
            now = time.monotonic()
            if self.running(name) is None:
                raise self.died(name, f"it ended after {now - began:.0f} s")
            if now - began > timeout_s:
                raise self.died(name, f"not healthy after {timeout_s:.0f} s")
            if now - told > PROGRESS_EVERY_S:
                on_event(f"{name}: starting, {now - began:.0f} s")
                told = now
            time.sleep(POLL_S)
        on_event(f"{name}: healthy after {time.monotonic() - began:.0f} s")

    def died(self, name: str, seen: str) -> ProcessDied:
        """The error for a process that did not come up."""
        lines = self.log(name).read_text(errors="replace").splitlines() if self.log(name).exists() else []
        tail = "\n".join(f"    {line}" for line in lines[-TAIL_LINES:])
        return ProcessDied(
            f"starting {name}", seen=f"{seen}; the end of {self.log(name)}:\n{tail}\n", do="Correct what it says there."
        )

    def stop(self, name: str) -> bool:
        """End it with all its children and shared memory; whether there was anything to end."""
        started = self.recorded(name)
        if started is None:
            return False
        members = _members(started)
        segments = shared_memory(members)
        for number, patience in ((signal.SIGINT, GRACE_S), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
            if not members:
                break
            for pid in members:
                deaf = number == signal.SIGINT and ignores(pid, number)  # a shell's background job has it from there
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM if deaf else number)
            members = _wait_gone(started, patience)
        for segment in segments | {str(p) for p in SHARED_MEMORY.glob(f"*{started.shm}*") if started.shm}:
            Path(segment).unlink(missing_ok=True)
        (self.directory / f"{name}.json").unlink(missing_ok=True)
        return True


@dataclass(frozen=True, slots=True)
class InUse:
    """A lock that many share who use, and one holds who replaces."""

    handle: int

    def share(self) -> None:
        """Use; waits while somebody replaces."""
        fcntl.flock(self.handle, fcntl.LOCK_SH)

    def try_alone(self) -> bool:
        """Replace, if nobody else uses; whether it is so."""
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def alone(self, on_event: OnEvent) -> None:
        """Replace; waits, and says so, while others use."""
        told = 0.0
        while not self.try_alone():
            if time.monotonic() - told > PROGRESS_EVERY_S * 2:
                on_event("waiting for another run to finish with the engine")
                told = time.monotonic()
            time.sleep(POLL_S)


def _yield_to_others(pid: int, nice: int) -> None:
    """Lower the priority of a process that was just started, and of all that it will start.

    Where the kernel groups processes by session (sched_autogroup), niceness counts inside a group alone: the
    group's own has to be set too, else an engine starves the daemon and the store in their sessions.
    """
    if nice:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, pid, nice)
            Path(f"/proc/{pid}/autogroup").write_text(str(nice))


def free_ports(count: int) -> list[int]:
    """Different TCP ports that are free on loopback, none of those that the kernel hands out by itself.

    A server binds seconds after it was told its port. One from Linux's ephemeral range (32768 and up, unless set
    otherwise) may have become some connection's own by then, or the next answer of this function.
    """
    found: list[int] = []
    for port in random.sample(LISTENING, len(LISTENING)):
        if len(found) == count:
            break
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
    return found


def free_port() -> int:
    """One of them."""
    return free_ports(1)[0]


def _members(started: Started) -> list[int]:
    """The process and everything in its session. A pid is never reused while a session bears it."""
    leader = start_ticks(started.pid)
    return session_of(started.pid) if leader in (None, started.ticks) else []


def _wait_gone(started: Started, patience_s: float) -> list[int]:
    """Those that are still there after a while."""
    deadline = time.monotonic() + patience_s
    while (members := _members(started)) and time.monotonic() < deadline:
        time.sleep(0.1)
    with suppress(ChildProcessError):
        os.waitpid(started.pid, os.WNOHANG)  # ours, if this very process started it
    return members
