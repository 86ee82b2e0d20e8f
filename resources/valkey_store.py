"""Valkey, Redis and ElastiCache as L2. How they are reached belongs in `resources/valkey_access.py`.

Only commands of one key each, as ElastiCache Serverless asks for, sent in pipelines.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from resources.valkey_access import ValkeyAccess
from warmers.errors import WarmfrontError
from warmers.presence import StoreUsage

if TYPE_CHECKING:
    from redis.connection import ConnectionPool

BATCH = 5000
"""Commands in one pipeline: bounds what server and client buffer."""
GLOB = re.compile(r"([*?\[\]\\])")
PROBE_S = 10
T = TypeVar("T")
Command = tuple[str | int, ...]
"""Its name, its one key, and what else it takes."""


@dataclass(frozen=True)
class ValkeyStore:
    """Satisfies warmers.presence.KVStore."""

    access: ValkeyAccess

    @classmethod
    def at(cls, url: str) -> "ValkeyStore":
        """One that asks for no password: the embedded stack's."""
        return cls(ValkeyAccess(url))

    @property
    def client(self) -> Any:
        """redis-py's, connected when it is first used."""
        return self.access.client

    def sizes(self, keys: Sequence[str]) -> NDArray[np.int64]:
        """STRLEN; Valkey says 0 for an absent key, and LMCache stores nothing empty."""
        lengths = self._each("asking for sizes", keys, lambda batch: [("STRLEN", key) for key in batch])
        return np.where(lengths == 0, -1, lengths)

    def lives(self, keys: Sequence[str]) -> NDArray[np.float64]:
        """PTTL."""
        left = self._each("asking for the life", keys, lambda batch: [("PTTL", key) for key in batch])
        return np.select([left == -2, left == -1], [-1.0, np.inf], left / 1000)

    def extend(self, keys: Sequence[str], seconds: NDArray[np.int64]) -> None:
        """EXPIRE."""
        whole = dict(zip(keys, seconds.tolist(), strict=True))
        self._each("extending", keys, lambda batch: [("EXPIRE", key, whole[key]) for key in batch])

    def delete(self, keys: Sequence[str]) -> None:
        """UNLINK."""
        self._each("deleting", keys, lambda batch: [("UNLINK", key) for key in batch])

    def names(self, start: str) -> Iterator[list[str]]:
        """SCAN, on every node: it goes through all keys of the server, whosever they are."""
        pattern = GLOB.sub(r"\\\1", start) + "*"
        found = self._try("listing", lambda: self.client.scan_iter(pattern, count=BATCH))
        while batch := self._try("listing", lambda: [key.decode() for key in islice(found, BATCH)]):
            yield batch

    def usage(self) -> StoreUsage:
        """INFO of every node, added up."""
        nodes = self._try("asking for memory", self._infos)
        limits = [int(node.get("maxmemory", 0)) for node in nodes]
        return StoreUsage(
            used_bytes=sum(int(node["used_memory"]) for node in nodes),
            capacity_bytes=sum(limits) if all(limits) else None,
            eviction_policy=str(nodes[0].get("maxmemory_policy", "")) or None,
            evicted_keys=sum(int(node.get("evicted_keys", 0)) for node in nodes),
        )

    def require_writable(self, start: str) -> None:
        """Write a key that lasts ten seconds, and delete it: on a reader, or full, neither works."""
        key = f"{start}warmfront-probe"
        self._try("writing", lambda: self._ask([("SET", key, "", "EX", PROBE_S)]))
        self.delete([key])

    def ping(self) -> bool:
        """Whether the server answers."""
        try:
            return bool(self._try("pinging", lambda: self.client.ping()))
        except WarmfrontError:
            return False

    def _infos(self) -> list[dict[str, Any]]:
        if not self.access.cluster:
            return [self.client.info()]
        found: Any = self.client.info(target_nodes=self.client.PRIMARIES)
        return list(found.values()) if "used_memory" not in found else [found]

    def _each(
        self, doing: str, keys: Sequence[str], commands: Callable[[Sequence[str]], list[Command]]
    ) -> NDArray[np.int64]:
        answers = np.empty(len(keys), np.int64)
        for start in range(0, len(keys), BATCH):
            ask = partial(self._ask, commands(keys[start : start + BATCH]))
            answers[start : start + BATCH] = self._try(f"{doing} of {len(keys)} keys", ask)
        return answers

    def _ask(self, commands: list[Command]) -> list[Any]:
        if self.access.cluster:
            return _Nodes(self.client, commands).ask()
        answers = exchange(self.client.connection_pool, commands)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def _try(self, doing: str, call: Callable[[], T]) -> T:
        from redis.exceptions import RedisError

        try:
            return call()
        except RedisError as error:
            raise self.access.explained(doing, error) from error


@dataclass
class _Nodes:
    """A batch of commands on a cluster: each goes to the node that has its key's slot, wherever that moves."""

    redis: Any
    commands: list[Command]
    answers: dict[int, Any] = field(default_factory=dict)

    def ask(self) -> list[Any]:
        left = self._ask_nodes(range(len(self.commands)))
        if left:
            self.redis.nodes_manager.initialize()
            left = self._ask_nodes(left)
        for number in left:  # of a slot on its way: redis-py follows each redirection
            self.answers[number] = self.redis.execute_command(*self.commands[number])
        return [self.answers[number] for number in range(len(self.commands))]

    def _ask_nodes(self, numbers: Sequence[int]) -> list[int]:
        """Ask the nodes that are thought to have the keys; those that have to be asked for again."""
        from redis.exceptions import ConnectionError, RedisError, TimeoutError

        again: list[int] = []
        for node, of_node in self._by_node(numbers).items():
            try:
                pool = self.redis.get_redis_connection(node).connection_pool
                answers = exchange(pool, [self.commands[n] for n in of_node])
            except (ConnectionError, TimeoutError) as error:
                answers = [error] * len(of_node)
            for number, answer in zip(of_node, answers, strict=True):
                if isinstance(answer, RedisError):
                    again.append(number)
                else:
                    self.answers[number] = answer
        return again

    def _by_node(self, numbers: Sequence[int]) -> dict[Any, list[int]]:
        from redis.crc import key_slot

        found: dict[Any, list[int]] = {}
        for number in numbers:
            slot = key_slot(str(self.commands[number][1]).encode())
            found.setdefault(self.redis.nodes_manager.get_node_from_slot(slot), []).append(number)
        return found


def exchange(pool: "ConnectionPool", commands: Sequence[Command]) -> list[Any]:
    """Send every command, then read the answers; an error that is the answer to one stands in its place.

    Packed here: redis-py's own pipeline takes four times as long, checking each command and each answer.
    """
    from hiredis import pack_command
    from redis.exceptions import ResponseError

    packed = b"".join([pack_command(command) for command in commands])  # type: ignore[arg-type]
    connection: Any = pool.get_connection()

    def answer() -> Any:
        try:
            return connection.read_response()
        except ResponseError as error:
            return error

    def once() -> list[Any]:
        connection.send_packed_command([packed])
        return [answer() for _ in commands]

    try:
        answers: list[Any] = connection.retry.call_with_retry(once, lambda _: connection.disconnect())
        return answers
    except BaseException:
        connection.disconnect()  # answers that nobody read must not meet the next command
        raise
    finally:
        pool.release(connection)
