"""A connection to Valkey, and what its errors mean. What is asked over it belongs in `resources/valkey_store.py`."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from resources.valkey_credentials import ElastiCacheToken, EnvironmentPassword, PasswordFile
from warmers.errors import ConfigError, StoreUnavailable, WarmfrontError

TIMEOUT_S = 10.0
"""For one answer: a store that takes longer is as good as away."""
CONNECT_S = 5.0
CONNECTIONS = 8
"""To each node: ElastiCache Serverless counts them, and engines need theirs."""

Who = EnvironmentPassword | PasswordFile | ElastiCacheToken


@dataclass(frozen=True)
class ValkeyAccess:
    """How one is reached: a node, or a cluster by any of its nodes."""

    url: str
    """redis://host:port, or rediss:// for TLS; without credentials."""
    who: Who | None = None
    ca_file: Path | None = None
    """Of a private CA; None: those that the system trusts."""
    cluster: bool = False

    @cached_property
    def client(self) -> Any:
        """redis.Redis, or redis.RedisCluster. The cluster is asked for its nodes at once."""
        from redis import Redis
        from redis.backoff import ExponentialBackoff
        from redis.cluster import RedisCluster
        from redis.exceptions import ConnectionError, TimeoutError
        from redis.retry import Retry

        options: dict[str, Any] = {
            "credential_provider": self.who,
            "socket_timeout": TIMEOUT_S,
            "socket_connect_timeout": CONNECT_S,
            "max_connections": CONNECTIONS,
            "retry": Retry(ExponentialBackoff(cap=1.0, base=0.1), 3),
        }
        if self.url.startswith("rediss://"):
            options |= {"ssl_cert_reqs": "required", "ssl_check_hostname": True}
            options["ssl_ca_certs"] = str(self.ca_file) if self.ca_file else None
        if self.cluster:
            return RedisCluster.from_url(self.url, require_full_coverage=False, **options)
        return Redis.from_url(self.url, retry_on_error=[ConnectionError, TimeoutError], **options)

    def explained(self, doing: str, error: Exception) -> WarmfrontError:
        """The error for what could not be done: ConfigError where somebody has to change something first."""
        from redis.exceptions import AuthenticationError, NoPermissionError, OutOfMemoryError, ReadOnlyError

        attempted, seen = f"{doing} in Valkey at {self.url}", f"{type(error).__name__}: {error}"
        if "certificate verify failed" in seen.lower() or "hostname mismatch" in seen.lower():
            do = "Name its CA in l2.ca_file, and the host as its certificate does."
            return ConfigError(attempted, seen=seen, do=do)
        if isinstance(error, AuthenticationError):
            return ConfigError(attempted, seen=seen, do="Correct l2.username and the password, token or role.")
        if isinstance(error, NoPermissionError):
            return ConfigError(attempted, seen=seen, do="Give the user the commands that the README lists.")
        if isinstance(error, ReadOnlyError):
            do = "Name the primary's endpoint, not the readers'; after a failover run again."
        elif isinstance(error, OutOfMemoryError):
            do = "Give it more memory, or a maxmemory-policy that evicts."
        else:
            do = "Check that it runs, its address and its memory; the next run goes on where this one stopped."
        return StoreUnavailable(attempted, seen=seen, do=do)
