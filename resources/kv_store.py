"""L2 tiers as key-value stores: existence, size, deletion."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from warmers.errors import ConfigError, StoreUnavailable

if TYPE_CHECKING:
    from redis import Redis

BATCH = 5000
"""Commands in one pipeline: bounds what server and client buffer."""
TIMEOUT_S = 10.0
T = TypeVar("T")


@dataclass(frozen=True)
class ValkeyStore:
    """Valkey or Redis, one node. Satisfies warmers.presence.KVStore."""

    url: str
    """redis://host:port, without credentials."""
    username: str | None = None
    password_env: str | None = None

    @cached_property
    def client(self) -> "Redis":
        from redis import Redis
        from redis.backoff import ExponentialBackoff
        from redis.exceptions import ConnectionError, TimeoutError
        from redis.retry import Retry

        password = None
        if self.password_env is not None:
            password = os.environ.get(self.password_env)
            if password is None:
                raise ConfigError(
                    f"connecting to Valkey at {self.url}",
                    seen=f"l2.password_env names {self.password_env}, which is not set",
                    do="Set it.",
                )
        return Redis.from_url(
            self.url,
            username=self.username,
            password=password,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=5.0,
            retry=Retry(ExponentialBackoff(cap=1.0, base=0.1), 3),
            retry_on_error=[ConnectionError, TimeoutError],
        )

    def sizes(self, keys: Sequence[str]) -> NDArray[np.int64]:
        """STRLEN of each key, pipelined; Valkey says 0 for an absent one, and LMCache stores nothing empty."""
        lengths = np.fromiter(self._batched(keys, "STRLEN", "asking for sizes"), np.int64, len(keys))
        return np.where(lengths == 0, -1, lengths)

    def delete(self, keys: Sequence[str]) -> int:
        """UNLINK each key by a command of its own, so that a cluster can take them too."""
        return sum(self._batched(keys, "UNLINK", "deleting"))

    def ping(self) -> bool:
        """Whether the server answers."""
        try:
            return bool(self._try("pinging", self.client.ping))
        except StoreUnavailable:
            return False

    def _batched(self, keys: Sequence[str], command: str, doing: str) -> list[int]:
        answers: list[int] = []
        for start in range(0, len(keys), BATCH):
            ask = partial(self._ask, command, keys[start : start + BATCH])
            answers += self._try(f"{doing} of {len(keys)} keys", ask)
        return answers

    def _ask(self, command: str, keys: Sequence[str]) -> list[int]:
        """Send the command for every key, then read the answers.

        Packed here: redis-py's own pipeline takes four times as long, checking each command and each answer.
        """
        from hiredis import pack_command

        packed = b"".join([pack_command((command, key)) for key in keys])  # type: ignore[arg-type]
        pool = self.client.connection_pool
        connection: Any = pool.get_connection()

        def exchange() -> list[int]:
            connection.send_packed_command([packed])
            return [connection.read_response() for _ in keys]

        try:
            answers: list[int] = connection.retry.call_with_retry(exchange, lambda _: connection.disconnect())
            return answers
        except BaseException:
            connection.disconnect()  # answers that nobody read must not meet the next command
            raise
        finally:
            pool.release(connection)

    def _try(self, doing: str, call: Callable[[], T]) -> T:
        from redis.exceptions import RedisError

        try:
            return call()
        except RedisError as error:
            raise StoreUnavailable(
                f"{doing} in Valkey at {self.url}",
                seen=f"{type(error).__name__}: {error}",
                do="Check that it runs, its address and its memory; the next run goes on where this one stopped.",
            ) from error
