"""One value straight from a Valkey's socket to where it is wanted. Everything else is left to redis-py."""

import builtins
from collections.abc import Callable
from typing import Any

from redis.cluster import RedisCluster
from redis.exceptions import ConnectionError, ResponseError, TimeoutError

HEAD_BYTES = 64
"""Read at first: more than the head of any value takes."""
NONE = (b"$-1", b"_")
"""As RESP2 and RESP3 say that there is no such key."""


class _OtherSize(Exception):
    """There is a value, and it would not fill its place."""


def pool_of(client: Any, key: str) -> Any:
    """The connections to the node that has a key."""
    if isinstance(client, RedisCluster):
        return client.get_redis_connection(client.get_node_from_key(key)).connection_pool
    return client.connection_pool


def receive(pool: Any, key: str, place: memoryview) -> bool:
    """GET straight from the socket into `place`: redis-py would copy megabytes twice on their way.

    False where there is none, or one of another size. Raises ResponseError for what the server refuses, ConnectionError
    and TimeoutError; of a connection that something is left on, no more is read.
    """
    connection = pool.get_connection()
    whole = found = False
    try:
        connection.send_command("GET", key)
        found = _bulk(connection._sock.recv_into, place)  # the one thing that redis-py does not offer
        whole = True
    except _OtherSize:
        pass
    except OSError as error:
        late = isinstance(error, builtins.TimeoutError)
        raise TimeoutError("no answer in time") if late else ConnectionError(str(error)) from error
    finally:
        if not whole:
            connection.disconnect()
        pool.release(connection)
    return found


def _bulk(recv_into: Callable[[memoryview], int], place: memoryview) -> bool:
    """Read one bulk string: `$<size>`, CR LF, that many bytes, CR LF; or the one that stands for none."""

    def read(into: memoryview) -> int:
        count = recv_into(into)
        if not count:
            raise ConnectionError("the server closed the connection")
        return count

    buffer = bytearray(HEAD_BYTES)
    filled = 0
    while (end := buffer.find(b"\r\n", 0, filled)) < 0 and filled < HEAD_BYTES:
        filled += read(memoryview(buffer)[filled:])
    head = bytes(buffer[: max(end, 0)])
    if head in NONE:
        return False
    if head != b"$%d" % len(place):
        raise _OtherSize if head[:1] == b"$" else ResponseError(head.decode(errors="replace"))
    rest = buffer[end + 2 : filled]
    got = min(len(rest), len(place))
    place[:got] = rest[:got]
    while got < len(place):
        got += read(place[got:])
    after = max(0, len(rest) - len(place))
    while after < 2:
        after += read(memoryview(buffer)[: 2 - after])
    return True
