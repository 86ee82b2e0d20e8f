"""Fakes at the Protocol seams, for what cannot run in every test: an engine with its daemon, a store, a clock.

The fake engine writes real LMCache keys into whatever store it is given, so that everything on the other side
of the seam is the real thing. Its tokens are characters; its "KV" is derived from the tokens and the weights.
"""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from redis import RedisError

from resources.workspace import Workspace
from warmers.errors import EngineRefused
from warmers.fleet import EngineSpec, Fleet, KVShape, Model, ProofFloors, WarmLimits
from warmers.identity import DaemonIdentity, EngineIdentity
from warmers.keys import KeyLayout, chunk_keys
from warmers.ledger import Rows, merge
from warmers.prefixes import Prefix, Usage
from warmers.presence import StoreUsage
from warmers.replica import Counters, Generation, StoreCounts
from warmers.salts import Adapter, combined

CHUNK = 16


def make_fleet(name="chat", tp=1, limits=None, floors=None, weights="a" * 64, dtype="float32", adapters=()) -> Fleet:
    return Fleet(
        name=name,
        model=Model("m", "/models/m", weights, "b" * 64, KVShape(layers=1, kv_heads=2, head_dim=2)),
        engine=EngineSpec("0.32.0", "0.5.6", dtype, tensor_parallel=tp, block_tokens=8, chunk_tokens=CHUNK),
        limits=limits or WarmLimits(visible_deadline_s=0.5),
        floors=floors or ProofFloors(),
        adapters=tuple(Adapter(name, f"/adapters/{name}", digest, 8) for name, digest in dict(adapters).items()),
    )


def make_prefix(ids, label="t", salt="", weight=1.0, rendered=None, adapter=None) -> Prefix:
    """`adapter`: an Adapter that its requests ask for."""
    ids = np.asarray(ids, np.uint32)
    whole = np.append(ids, [7, 8, 9]).astype(np.uint32) if rendered is None else np.asarray(rendered, np.uint32)
    asked = {"adapter": adapter.name, "adapter_salt": adapter.salt} if adapter else {}
    return Prefix(label, None, "d" * 64, whole, len(ids), CHUNK, salt=salt, weight=weight, **asked)


def words(text: str) -> list[int]:
    """Token ids in which each letter fills one chunk."""
    return [ord(letter) * 1000 + i for letter in text for i in range(CHUNK)]


class DictStore:
    """A KVStore in memory, which forgets keys as Valkey does."""

    def __init__(self, clock=None):
        self.values: dict[str, bytes] = {}
        self.ends: dict[str, float] = {}
        self.clock = clock or FakeClock()

    def sizes(self, keys):
        self._forget()
        return np.array([len(self.values[k]) if k in self.values else -1 for k in keys], np.int64)

    def lives(self, keys):
        self._forget()
        now = self.clock.time
        return np.array([self.ends.get(k, np.inf) - now if k in self.values else -1.0 for k in keys], np.float64)

    def extend(self, keys, seconds):
        self._forget()
        for key, more in zip(keys, seconds.tolist(), strict=True):
            if key in self.values:
                self.ends[key] = self.clock.time + more

    def delete(self, keys):
        self._drop(keys)

    def names(self, start):
        found = sorted(key for key in self.values if key.startswith(start))
        for at in range(0, len(found), 5):
            yield found[at : at + 5]

    def usage(self):
        return StoreUsage(sum(map(len, self.values.values())), 1 << 20, "volatile-lru")

    def require_writable(self, start):
        pass

    def put(self, key, value, ttl_s=None):
        self.values[key] = value
        if ttl_s is not None:
            self.ends[key] = self.clock.time + ttl_s

    def get(self, key):
        self._forget()
        return self.values.get(key)

    def _forget(self):
        self._drop([key for key, end in self.ends.items() if end <= self.clock.time])

    def _drop(self, keys):
        for key in keys:
            self.values.pop(key, None)
            self.ends.pop(key, None)


class FakeClock:
    """Moves when somebody sleeps."""

    def __init__(self, now=1_000.0):
        self.time = now

    def now(self):
        self.time += 0.001
        return self.time

    def sleep(self, seconds):
        self.time += seconds


class MovableClock:
    """Real time, and what the test adds to it."""

    def __init__(self):
        self.ahead = 10.0  # past the moment in which a file may be half written

    def now(self):
        return time.time() + self.ahead

    def sleep(self, seconds):
        time.sleep(seconds)


class MemoryJournal:
    """A ledger in memory."""

    def __init__(self):
        self.segments: list[Rows] = []

    def record(self, rows):
        self.segments.append(rows)

    def rows(self):
        return merge(self.segments)

    def rewrite(self, rows):
        self.segments = [rows]


class FreeFence:
    """A lease that nobody contests."""

    number = 1

    def check(self):
        pass


@dataclass
class FakeEngine:
    """A vLLM server with an LMCache daemon behind it, as one object. Not a real engine."""

    fleet: Fleet
    store: object
    weights: str = ""
    connector: str = "LMCacheMPConnector"
    salting: bool = True
    """Whether its middleware is on, which gives adapters their salts."""
    refuse: Callable[[np.ndarray], bool] = lambda ids: False
    on_prefill: Callable[[int], None] = lambda n: None
    write_behind: bool = False
    l0: set = field(default_factory=set)
    computed: int = 0
    local_hit: int = 0
    external: int = 0
    found: int = 0
    asked: int = 0
    submitted: int = 0
    completed: int = 0
    renders: int = 0
    prefills: list = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    lie_found: int = 0

    # Engine
    def render(self, messages, options):
        self.renders += 1
        head = json.dumps(options.tools) if options.tools else ""
        return self.tokenize(head + "".join(f"<{m['role']}>{m['content']}</>" for m in messages) + "<assistant>")

    def render_for_chat(self, messages, options):
        return self.render(messages, options)

    def tokenize(self, text, *, special_tokens=False):
        return np.array([ord(c) for c in text], np.uint32)

    def identity(self):
        s = self.fleet.engine
        return EngineIdentity(
            self.fleet.model.argument,
            s.vllm,
            s.max_model_len,
            s.dtype,
            s.block_tokens,
            s.tensor_parallel,
            "auto",
            self.connector,
            tuple(adapter.name for adapter in self.fleet.adapters),
            self.fleet.salt_table_digest if self.salting and self.fleet.adapters else None,
        )

    def prefill(self, ids, salt, adapter=None):
        if self.refuse(ids):
            raise EngineRefused("POST /v1/completions", seen="HTTP 400: no", do="Do not.")
        self.on_prefill(len(self.prefills))
        with self.lock:
            self.prefills.append((len(ids), salt))
            cached, _ = self._serve(ids, salt, adapter)
        return Usage(len(ids), cached)

    # Replica
    def _names(self, ids, salt, adapter):
        served = self.fleet.adapter(adapter) if self.salting else None
        names = list(chunk_keys(ids, KeyLayout.of(self.fleet), combined(served.salt if served else "", salt or "")))
        tp = self.fleet.engine.tensor_parallel
        return [names[i : i + tp] for i in range(0, len(names), tp)]

    def _kv(self, name, adapter):
        digest = next(part for part in name.removesuffix(".data").split("@") if len(part) == 64)  # whatever the salt
        seed = hashlib.sha256((self.weights + (adapter or "") + digest).encode()).digest()
        return (seed * (self.fleet.chunk_bytes // len(seed) + 1))[: self.fleet.chunk_bytes]

    def _serve(self, ids, salt, adapter=None):
        """Hit L0, then the store, then compute; what is computed is stored. Returns cached tokens and the KV."""
        chunks = self._names(ids, salt, adapter)
        kv, cached, hitting = [], 0, True
        local = external = found = 0
        for names in chunks:
            stored = [self.store.get(n) for n in names]
            whole = self.connector and all(v is not None and len(v) == self.fleet.chunk_bytes for v in stored)
            if hitting and whole:
                found += CHUNK
            if hitting and names[0] in self.l0:
                local += CHUNK
            elif hitting and whole:
                external += CHUNK
                stored_kv = stored
                kv.append(stored_kv[0])
                self.l0.add(names[0])
                continue
            else:
                hitting = False
                for name in names:
                    if self.connector:
                        self.submitted += 1
                        self.put(name, self._kv(name, adapter))
                self.l0.add(names[0])
            kv.append(stored[0] if stored[0] is not None else self._kv(names[0], adapter))
        cached = local + external
        self.asked += len(chunks) * CHUNK if self.connector else 0
        self.local_hit += local
        self.external += external
        self.found += found + (self.lie_found if found else 0)
        self.computed += len(ids) - cached
        return cached, kv

    def put(self, name, value):
        if not self.write_behind and self.store.put(name, value) is not False:
            self.completed += 1

    @property
    def engine(self):
        return self

    fresh: bool = True

    def daemon_identity(self):
        prefix = (self.fleet.namespace,)
        return DaemonIdentity("0.5.6", CHUNK, "blake3", prefix, (self.fleet.model.path,) if self.connector else ())

    def forget(self):
        self.l0.clear()

    def generate(self, ids, *, max_tokens, salt=None, adapter=None):
        cached, kv = self._serve(ids, salt, adapter)
        seed = hashlib.sha256(b"".join(kv) + ids.tobytes()).digest()
        return Generation(tuple(seed[:max_tokens]), 0.1 if cached else 1.0, len(ids), cached)

    def chat_ids(self, messages, options, salt, adapter=None):
        ids = self.render(messages, options)
        self._serve(ids, salt, adapter)
        return ids

    def counters(self):
        return Counters(self.computed, self.local_hit, self.external, 0, self.found, self.asked)

    def stores(self):
        return StoreCounts(self.submitted, self.completed)


@dataclass
class FakeReplicas:
    """Hands out a fake engine; `cold` drops what it remembers."""

    engine: FakeEngine

    @contextmanager
    def warmer(self, fleet) -> Iterator[FakeEngine]:
        yield self.engine

    @contextmanager
    def cold(self, fleet) -> Iterator[FakeEngine]:
        self.engine.forget()
        self.engine.computed = self.engine.local_hit = self.engine.external = self.engine.asked = 0
        yield self.engine

    def running(self, fleet):
        return self.engine


class ValkeyValues:
    """The values behind a ValkeyStore, for the fake engine to write; as LMCache does, it swallows what goes wrong."""

    def __init__(self, store, ttl_s):
        self.client, self.ttl_s = store.client, ttl_s

    def put(self, key, value):
        try:
            return bool(self.client.set(key, value, ex=self.ttl_s))
        except RedisError:
            return False

    def get(self, key):
        try:
            return self.client.get(key)
        except RedisError:
            return None


class FakedWorkspace(Workspace):
    """A workspace whose replicas are fakes; everything else is real."""

    @cached_property
    def engines(self) -> dict[str, FakeEngine]:
        return {}

    @property
    def engine(self) -> FakeEngine:
        """Of the fleet `chat`."""
        return self.engine_of("chat")

    def engine_of(self, name) -> FakeEngine:
        if name not in self.engines:
            self.engines[name] = FakeEngine(self.fleet(name), ValkeyValues(self.store(name), self.fleet(name).ttl_s))
        return self.engines[name]

    def replicas(self, name):
        return FakeReplicas(self.engine_of(name))

    def telling(self, on_event):
        return self
