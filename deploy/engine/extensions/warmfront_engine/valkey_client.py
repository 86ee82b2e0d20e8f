"""A Valkey as the engine's side reaches it: over TLS, as an ACL or IAM user, a node or a cluster.

Knows nothing of LMCache. What is a hit and what a miss belongs in `valkey_l2.py`.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

from redis import Redis
from redis.backoff import ExponentialBackoff
from redis.cluster import RedisCluster
from redis.credentials import CredentialProvider, UsernamePasswordCredentialProvider
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,
    ReadOnlyError,
    RedisClusterException,
    ResponseError,
    TimeoutError,
)
from redis.retry import Retry

from warmfront_engine.valkey_read import pool_of, receive

log = logging.getLogger(__name__)
T = TypeVar("T")

TOKEN_S = 900
"""For which ElastiCache takes a token, at most."""
REFRESH_S = 600.0
"""After which a token is made anew."""
PAUSE_S = 2.0
"""After a server gave no answer nobody asks it for so long: an engine recomputes, and does not wait."""
SAY_AGAIN_S = 60.0
CERTIFICATE = ("certificate verify failed", "hostname mismatch", "wrong version number")
"""What an error says when the server is not who it should be, or speaks no TLS."""
AWAY = (ConnectionError, TimeoutError, RedisClusterException)


@dataclass(frozen=True, slots=True)
class Iam:
    """An ElastiCache cache that takes IAM users. Name it as it was made: that is what the token is signed for."""

    cache_name: str
    region: str
    serverless: bool = True


@dataclass(frozen=True, slots=True)
class Where:
    """`adapter_params` of the adapter. No secret is in it: it stands on the daemon's command line."""

    host: str
    port: int = 6379
    tls: bool = False
    cluster: bool = False
    key_prefix: str = ""
    """The namespace, joined with each key by @."""
    ttl_seconds: int | None = None
    username: str | None = None
    password_env: str | None = None
    password_file: str | None = None
    iam: Iam | None = None
    ca_file: str | None = None
    """Of a private CA; None: those that the system trusts."""
    num_workers: int = 4
    """Threads that read; half as many write."""
    timeout_s: float = 2.0
    """For one answer."""

    @classmethod
    def parse(cls, params: dict[str, Any]) -> "Where":
        """Raises ValueError, which names the field."""
        known = {f.name for f in fields(cls)}
        if unknown := params.keys() - known:
            raise ValueError(f"adapter_params: {', '.join(sorted(unknown))} unknown; known are {sorted(known)}")
        if not params.get("host"):
            raise ValueError("adapter_params: host is missing")
        iam = Iam(**params["iam"]) if params.get("iam") else None
        where = cls(**{**params, "iam": iam})
        sources = [s for s in ("password_env", "password_file", "iam") if getattr(where, s) is not None]
        if len(sources) > 1:
            raise ValueError(f"adapter_params: {' and '.join(sources)} exclude each other")
        if iam is not None and not (where.tls and where.username):
            raise ValueError("adapter_params: iam needs tls and a username")
        if "@" in where.key_prefix:
            raise ValueError("adapter_params: key_prefix may not contain @")
        return where


@dataclass
class FilePassword(CredentialProvider):
    """A password in a file that somebody else rotates; read for each connection."""

    username: str | None
    path: Path

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Raises OSError where it cannot be read."""
        password = self.path.read_text().rstrip("\n")
        return (self.username, password) if self.username else (password,)


@dataclass
class IamToken(CredentialProvider):
    """A presigned request in place of a password, good for 15 minutes and for making a connection.

    Source: docs.aws.amazon.com/AmazonElastiCache/latest/dg/auth-iam.html. The server cuts a connection after 12 hours;
    the command that meets it makes another one, with a token of its own.
    """

    username: str
    iam: Iam
    find_credentials: Callable[[], Any] = field(default=lambda: _aws_credentials(), repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _token: str = field(default="", repr=False)
    _made_at: float = field(default=float("-inf"), repr=False)

    def get_credentials(self) -> tuple[str, str]:
        """Raises RuntimeError where there are no AWS credentials."""
        with self._lock:
            now = time.monotonic()
            if now - self._made_at > REFRESH_S:
                self._token, self._made_at = self._sign(), now
            return self.username, self._token

    def _sign(self) -> str:
        from botocore.auth import SigV4QueryAuth
        from botocore.awsrequest import AWSRequest

        kind = {"ResourceType": "ServerlessCache"} if self.iam.serverless else {}
        query = urlencode({"Action": "connect", "User": self.username, **kind})
        request = AWSRequest("GET", f"https://{self.iam.cache_name}/?{query}")
        SigV4QueryAuth(self.find_credentials(), "elasticache", self.iam.region, expires=TOKEN_S).add_auth(request)
        return str(request.url).removeprefix("https://")


def _aws_credentials() -> Any:
    """As botocore finds them: environment, web identity (IRSA, pod identity), instance."""
    from botocore.session import Session

    found = Session().get_credentials()
    if found is None:
        raise RuntimeError("there are no AWS credentials for an ElastiCache token: give the pod a role")
    return found.get_frozen_credentials()


def _credentials(where: Where) -> CredentialProvider | None:
    if where.iam is not None:
        return IamToken(where.username or "", where.iam)
    if where.password_file is not None:
        return FilePassword(where.username, Path(where.password_file))
    if where.password_env is not None:
        password = os.environ.get(where.password_env)
        if password is None:
            raise ValueError(f"adapter_params: password_env names {where.password_env}, which is not set")
        return UsernamePasswordCredentialProvider(where.username, password)
    return None


class ValkeyClient:
    """One server or cluster, for several threads. A call that fails has a value in its place: never an exception.

    A connection that was cut is made again at once, with credentials that are asked for anew. A server that gives no
    answer is left alone for PAUSE_S, so that an outage costs each request a recomputation and not a time-out as well.
    """

    def __init__(self, where: Where) -> None:
        self.where = where
        self.failures = 0
        self.reachable = False
        self._who = _credentials(where)
        self._made: Redis | RedisCluster | None = None
        self._lock = threading.Lock()
        self._asked_again_at = 0.0
        self._said: dict[str, float] = {}

    def require(self) -> None:
        """Ask once. Raises for what somebody has to mend: credentials, certificates. One that is away may come back."""
        try:
            self._client().ping()
        except AWAY as error:
            if _to_mend(error):
                raise
            self._failed(error)
        else:
            self.reachable = True

    def get_into(self, key: str, place: memoryview) -> bool:
        """Whether its value fills `place` now: it is there, can be had, and has that size."""

        def ask(client: Any) -> bool:
            try:
                return receive(pool_of(client, key), key, place)
            except (ConnectionError, ResponseError, TimeoutError) as error:
                # Cut, or the slot is elsewhere, perhaps since its node is gone: redis-py knows what to do.
                if isinstance(error, TimeoutError) and not self.where.cluster:
                    raise
                value = client.get(key)
            if value is None or len(value) != len(place):
                return False
            place[:] = value
            return True

        return self._call(ask, False)

    def put(self, key: str, value: memoryview) -> bool:
        """Whether it was stored."""
        return bool(self._call(lambda client: client.set(key, value, ex=self.where.ttl_seconds), False))

    def exist(self, keys: Sequence[str]) -> list[bool]:
        """Which of them are there, in one trip to each node."""

        def ask(client: Any) -> list[bool]:
            with client.pipeline(transaction=False) as pipeline:
                for key in keys:
                    pipeline.exists(key)
                return [bool(answer) for answer in pipeline.execute()]

        return self._call(ask, [False] * len(keys))

    def unlink(self, keys: Sequence[str]) -> None:
        """Delete; what is not there is no error."""

        def ask(client: Any) -> None:
            with client.pipeline(transaction=False) as pipeline:
                for key in keys:
                    pipeline.unlink(key)
                pipeline.execute()

        self._call(ask, None)

    def close(self) -> None:
        """Close every connection."""
        if self._made is not None:
            self._made.close()

    def _client(self) -> Any:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made

    def _make(self) -> Redis | RedisCluster:
        where = self.where
        threads = where.num_workers + max(1, where.num_workers // 2)
        options: dict[str, Any] = {
            "credential_provider": self._who,
            "socket_timeout": where.timeout_s,
            "socket_connect_timeout": where.timeout_s,
            "socket_keepalive": True,
            "max_connections": threads + 2,
            # Not for a time-out: that would be another timeout_s. ReadOnlyError: the primary is another one by now.
            "retry": Retry(ExponentialBackoff(cap=0.1, base=0.01), 1, (ConnectionError, ReadOnlyError)),
        }
        if where.tls:
            options |= {"ssl": True, "ssl_check_hostname": True, "ssl_ca_certs": where.ca_file}
        if where.cluster:
            return RedisCluster(host=where.host, port=where.port, require_full_coverage=False, **options)
        return Redis(host=where.host, port=where.port, **options)

    def _call(self, ask: Callable[[Any], T], otherwise: T) -> T:
        if time.monotonic() < self._asked_again_at:
            return otherwise
        try:
            answer = ask(self._client())
        except Exception as error:  # whatever it is, it is a miss: the engine computes
            self._failed(error)
            return otherwise
        self.reachable = True
        return answer

    def _failed(self, error: Exception) -> None:
        now, kind = time.monotonic(), type(error).__name__
        self.failures += 1
        if not isinstance(error, ResponseError):
            self.reachable, self._asked_again_at = False, now + PAUSE_S
        if now - self._said.get(kind, float("-inf")) > SAY_AGAIN_S:
            self._said[kind] = now
            log.warning("Valkey at %s:%d: %s: %s", self.where.host, self.where.port, kind, error)


def _to_mend(error: BaseException | None) -> bool:
    """Refused credentials, or a certificate; redis-py hides them in a ConnectionError, in turn in a cluster's error."""
    while error is not None:
        if isinstance(error, AuthenticationError) or any(text in str(error).lower() for text in CERTIFICATE):
            return True
        error = error.__cause__ or error.__context__
    return False
