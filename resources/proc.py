"""What Linux says of processes, under /proc."""

import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the mount of Linux, read and cleaned, never trusted


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the third on; None for a process that is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields


def start_ticks(pid: int) -> int | None:
    """Start time in clock ticks since boot, field 22 of proc(5); None for a process that is gone."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def ignores(pid: int, number: int) -> bool:
    """Whether a process ignores a signal, as it may have inherited; False for one that is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    mask = next((int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:")), 0)
    return bool(mask >> (number - 1) & 1)


def session_of(leader: int) -> list[int]:
    """Pids of everything in a session."""
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [pid for pid in pids if (fields := _stat(pid)) and int(fields[3]) == leader]


def shared_memory(pids: Sequence[int]) -> set[str]:
    """Shared-memory files that these processes have mapped; some outlive them."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                path = line.partition(f"{SHARED_MEMORY}/")
                if path[1] and not path[2].endswith("(deleted)"):
                    found.add(path[1] + path[2])
    return found


def identity_of(pid: int) -> str:
    """`host:pid:start`: names one process for ever."""
    return f"{socket.gethostname()}:{pid}:{start_ticks(pid)}"


def is_gone(identity: str | None) -> bool:
    """Whether a process of this host has ended; of one of another host, or of none, nothing is known."""
    host, _, rest = (identity or "").partition(":")
    return host == socket.gethostname() and identity != identity_of(int(rest.partition(":")[0]))
