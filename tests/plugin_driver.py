"""Runs in the engine's environment: LMCache's L2 adapters without a daemon, told what to do by lines of JSON.

    python tests/plugin_driver.py '{"type": "plugin", ...}'
    {"do": "store", "names": ["a"], "size": 10, "fill": 7}    -> {"ok": true, "bytes": 10}
    {"do": "lookup" | "load", "names": [...], "size": 10}    -> {"found": [...], "fill": [...]}
    {"do": "delete", "names": [...]}, {"do": "status"}, {"do": "close"}

Each answer has the seconds that it took.
"""

import hashlib
import json
import select
import sys
import time


def buffer(size, fill=0):
    """A piece of L1, as the daemon hands it out on a CPU."""
    import torch
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

    memory = torch.full((size,), fill, dtype=torch.uint8)
    shaped = {"shape": memory.shape, "dtype": memory.dtype, "fmt": MemoryFormat.UNDEFINED}
    return TensorMemoryObj(memory, MemoryObjMetadata(address=0, phy_size=size, ref_count=1, **shaped), None)


def object_keys(names):
    from lmcache.v1.distributed.api import ObjectKey

    return [ObjectKey(hashlib.sha256(name.encode()).digest(), "/models/m", 0x01000100) for name in names]


def wait(fd, query):
    """What LMCache's controllers do: poll the descriptor, then ask."""
    while (result := query()) is None or result == {}:
        ready, _, _ = select.select([fd], [], [], 60)
        if not ready:
            raise SystemExit("no answer within 60 s")
    return result


class Driver:
    def __init__(self, config):
        from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
        from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry

        parsed = get_l2_adapter_config_class(config["type"]).from_dict(config)
        self.adapter = create_l2_adapter_from_registry(parsed)

    def store(self, names, size, fill=0):
        adapter, buffers = self.adapter, [buffer(size, fill) for _ in names]  # whoever stores holds them until then
        task = adapter.submit_store_task(object_keys(names), buffers)
        result = wait(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)[task]
        del buffers
        return {"ok": result.is_successful(), "bytes": result.bytes_transferred() if result.is_successful() else 0}

    def lookup(self, names):
        adapter = self.adapter
        task = adapter.submit_lookup_and_lock_task(object_keys(names), {})
        bitmap = wait(adapter.get_lookup_and_lock_event_fd(), lambda: adapter.query_lookup_and_lock_result(task))
        return {"found": [bool(bitmap.test(n)) for n in range(len(names))]}

    def load(self, names, size):
        adapter, buffers = self.adapter, [buffer(size) for _ in names]
        task = adapter.submit_load_task(object_keys(names), buffers)
        bitmap = wait(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task))
        found = [bool(bitmap.test(n)) for n in range(len(names))]
        return {"found": found, "fill": [int(each.raw_data[-1]) for each in buffers]}

    def delete(self, names):
        self.adapter.delete(object_keys(names))
        return {}

    def status(self):
        return self.adapter.report_status()

    def close(self):
        self.adapter.close()
        return {}


def main():
    driver = Driver(json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        act = getattr(driver, asked.pop("do"))
        start = time.perf_counter()
        answer = act(**asked)
        print(json.dumps({**answer, "seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    main()
