"""A Valkey with TLS, a private CA and a user with a password, beside the embedded stack: it ends when that does.

PyPI's Valkey has no TLS; this one is the machine's own valkey-server or redis-server.
"""

import os
import secrets
import shutil
import socket
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import trustme

from resources.local_stack import HOST, VALKEY_MAXMEMORY
from resources.processes import Processes, free_port

NAME = "valkey-tls"
USER = "warmfront"


@dataclass(frozen=True)
class SecureValkey:
    """Its files and its address. Anybody may come in as the default user: it is on loopback, and for trying."""

    directory: Path
    port: int

    @property
    def url(self) -> str:
        return f"rediss://{HOST}:{self.port}"

    @property
    def ca_file(self) -> Path:
        return self.directory / "ca.pem"

    @property
    def password_file(self) -> Path:
        return self.directory / "password"


def ensure(stack: Path) -> SecureValkey:
    """Start it unless it runs; on the same port, with the same files and data as the last time."""
    binary = shutil.which("valkey-server") or shutil.which("redis-server")
    if binary is None:
        sys.exit("a Valkey with TLS is needed, and this machine has none: apt-get install redis-server")
    processes = Processes(stack)
    with processes.locked():
        server = _prepare(stack / NAME)
        if processes.running(NAME) is None:
            processes.start(NAME, _argv(binary, server), url=server.url, spec="")
        processes.wait(NAME, lambda: _listens(server.port), 30, lambda message: print(message, file=sys.stderr))
    return server


def _prepare(directory: Path) -> SecureValkey:
    """Its port, its password and certificates that no other server has; made once."""
    if not directory.exists():
        scratch = directory.with_name(f".{directory.name}.new")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(mode=0o700)
        authority = trustme.CA()
        issued = authority.issue_cert(HOST, "localhost")
        authority.cert_pem.write_to_path(str(scratch / "ca.pem"))
        issued.private_key_and_cert_chain_pem.write_to_path(str(scratch / "server.pem"))
        (scratch / "password").write_text(f"{secrets.token_urlsafe(24)}\n")
        (scratch / "port").write_text(str(free_port()))
        os.replace(scratch, directory)
    return SecureValkey(directory, int((directory / "port").read_text()))


def _argv(binary: str, server: SecureValkey) -> list[str]:
    password = sha256(server.password_file.read_text().rstrip("\n").encode()).hexdigest()
    shown = str(server.directory / "server.pem")
    return [
        *(binary, "--bind", HOST, "--port", "0", "--tls-port", str(server.port), "--tls-auth-clients", "no"),
        *("--tls-ca-cert-file", str(server.ca_file), "--tls-cert-file", shown, "--tls-key-file", shown),
        *("--dir", str(server.directory), "--save", "300 1", "--rdbcompression", "no"),
        *("--maxmemory", VALKEY_MAXMEMORY, "--maxmemory-policy", "volatile-lru"),
        *("--user", USER, "on", f"#{password}", "~*", "+@all"),
    ]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0
