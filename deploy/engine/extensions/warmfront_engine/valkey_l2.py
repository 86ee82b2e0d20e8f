"""Valkey as LMCache's L2, an adapter of type "plugin": for what LMCache's own `valkey` adapter cannot reach.

That one (0.5.6) takes a static password on the daemon's command line, and no CA. Start the daemon with

    --l2-adapter '{"type": "plugin", "module_path": "warmfront_engine.valkey_l2", "class_name": "ValkeyL2Adapter",
                   "adapter_params": {"host": "cache.example", "tls": true, "cluster": true, "username": "engine",
                                      "iam": {"cache_name": "kv", "region": "eu-central-1"}, "ttl_seconds": 604800}}'

`adapter_params` are the fields of `valkey_client.Where`. Keys and values are those of the `valkey` adapter: one may
take the other's place. The user needs GET, SET, EXISTS, UNLINK and PING on `<key_prefix>@*`, and CLUSTER SLOTS where it
is a cluster. Nothing is locked on the server: a key that lapses between lookup and load is a miss.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter import _object_key_to_string
from lmcache.v1.platform import create_event_notifier

from warmfront_engine.valkey_client import ValkeyClient, Where

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.memory_management import MemoryObj

log = init_logger(__name__)


class Results:
    """What is done of one kind of task, and the descriptor that says so; LMCache polls it."""

    def __init__(self) -> None:
        self.event = create_event_notifier()
        self._done: dict[int, Any] = {}
        self._lock = threading.Lock()

    def publish(self, task: int, result: Any) -> None:
        """Say that a task is done."""
        with self._lock:
            self._done[task] = result
        self.event.notify()

    def pop(self, task: int) -> Any:
        """The result, once; None before that, and after."""
        with self._lock:
            return self._done.pop(task, None)

    def pop_all(self) -> dict[int, Any]:
        """Every result that nobody has had yet."""
        with self._lock:
            done, self._done = self._done, {}
        return done


class ValkeyL2Adapter(L2AdapterInterface):
    """Reads and writes have threads of their own: what is stored behind a request does not delay the next load."""

    def __init__(self, params: dict[str, Any], l1_memory_desc: object = None) -> None:
        """`params`: see Where. Raises ValueError, and redis.RedisError for wrong credentials or certificates."""
        super().__init__(max_capacity_bytes=0)
        self.where = Where.parse(params)
        self.client = ValkeyClient(self.where)
        self.client.require()
        self._prefix = f"{self.where.key_prefix}@" if self.where.key_prefix else ""
        self._readers = ThreadPoolExecutor(self.where.num_workers, "valkey-read")
        self._writers = ThreadPoolExecutor(max(1, self.where.num_workers // 2), "valkey-write")
        self._stores, self._lookups, self._loads = Results(), Results(), Results()
        self._tasks = itertools.count(1)
        self._closed = False
        log.info("L2 is Valkey at %s:%d, keys %s*", self.where.host, self.where.port, self._prefix)

    def get_store_event_fd(self) -> int:
        """Signalled when a store is done."""
        return int(self._stores.event.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Signalled when a lookup is done."""
        return int(self._lookups.event.fileno())

    def get_load_event_fd(self) -> int:
        """Signalled when a load is done."""
        return int(self._loads.event.fileno())

    def submit_store_task(self, keys: "list[ObjectKey]", objects: "list[MemoryObj]") -> int:
        """SET each, with its life."""
        values = [memoryview(each.byte_array).cast("B") for each in objects]

        def finish(stored: list[bool]) -> L2StoreResult:
            done = [(key, len(value)) for key, value, ok in zip(keys, values, stored, strict=True) if ok]
            if done:
                self._notify_keys_stored([key for key, _ in done], [size for _, size in done])
            return L2StoreResult(all(stored), sum(size for _, size in done))

        names = self._names(keys)
        return self._submit(
            self._writers, self._stores, len(keys), lambda n: self.client.put(names[n], values[n]), finish
        )

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Those since the last call."""
        return self._stores.pop_all()

    def submit_lookup_and_lock_task(
        self, keys: "list[ObjectKey]", group_layout_descs: "dict[int, MemoryLayoutDesc]"
    ) -> int:
        """EXISTS of all, in one trip."""
        task = next(self._tasks)
        self._readers.submit(lambda: self._lookups.publish(task, _bitmap(self.client.exist(self._names(keys)))))
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Which keys are there; once."""
        return self._lookups.pop(task_id)

    def submit_unlock(self, keys: "list[ObjectKey]") -> None:
        """Nothing was locked."""

    def submit_load_task(self, keys: "list[ObjectKey]", objects: "list[MemoryObj]") -> int:
        """GET each into its place; a value of another size is a miss."""
        names, places = self._names(keys), [memoryview(each.byte_array).cast("B") for each in objects]

        def load(number: int) -> bool:
            return self.client.get_into(names[number], places[number])

        def finish(loaded: list[bool]) -> Bitmap:
            self._notify_keys_accessed([key for key, ok in zip(keys, loaded, strict=True) if ok])
            return _bitmap(loaded)

        return self._submit(self._readers, self._loads, len(keys), load, finish)

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Which keys were loaded; once."""
        return self._loads.pop(task_id)

    def delete(self, keys: "list[ObjectKey]") -> None:
        """UNLINK each."""
        if keys:
            self.client.unlink(self._names(keys))
            self._notify_keys_deleted(keys, [0] * len(keys))

    def report_status(self) -> dict[str, Any]:
        """Healthy unless closed: a store that is away is no reason to restart a daemon."""
        return {
            "is_healthy": not self._closed,
            "type": "warmfront-valkey",
            "reachable": self.client.reachable,
            "failures": self.client.failures,
            "host": self.where.host,
            "port": self.where.port,
            "tls_enable": self.where.tls,
            "cluster_mode": self.where.cluster,
            "key_prefix": self.where.key_prefix,
        }

    def close(self) -> None:
        """Finish what runs, and drop the rest."""
        if self._closed:
            return
        self._closed = True
        for pool in (self._readers, self._writers):
            pool.shutdown(wait=True, cancel_futures=True)
        for results in (self._stores, self._lookups, self._loads):
            results.event.close()
        self.client.close()

    def _names(self, keys: "Sequence[ObjectKey]") -> list[str]:
        return [self._prefix + _object_key_to_string(key) for key in keys]

    def _submit(
        self,
        pool: ThreadPoolExecutor,
        results: Results,
        count: int,
        part: Callable[[int], bool],
        finish: Callable[[list[bool]], Any],
    ) -> int:
        """Run `part` for each of `count` numbers in the pool; whichever is last publishes what `finish` makes of it."""
        task, ok, lock, left = next(self._tasks), [False] * count, threading.Lock(), itertools.count(count - 1, -1)

        def run(number: int) -> None:
            ok[number] = part(number)
            with lock:
                last = next(left) == 0
            if last:
                results.publish(task, finish(ok))

        for number in range(count):
            pool.submit(run, number)
        if count == 0:
            results.publish(task, finish(ok))
        return task


def _bitmap(so: Sequence[bool]) -> Bitmap:
    bitmap = Bitmap(len(so))
    bitmap.batched_set([number for number, yes in enumerate(so) if yes])
    return bitmap
