"""Replicas as processes on this machine: one LMCache daemon and one vLLM engine, of one fleet at a time.

Two cores carry one engine, so asking for a replica of another fleet ends the one that runs.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

from resources.adapter_files import read_adapter
from resources.engine import VllmEngine
from resources.lmcache import LmcacheDaemon
from resources.local_stack import HOST, LocalStack
from resources.processes import InUse, OnEvent, Processes, free_ports
from resources.replica_commands import ENGINE_ENV, LocalWeights, daemon_argv, engine_argv
from resources.settings import LocalSettings
from resources.tiers import Tier
from warmers.errors import ConfigError, EngineLost, SourceChanged
from warmers.fleet import Fleet
from warmers.identity import DaemonIdentity
from warmers.keys import TokenIds
from warmers.replica import Counters, Generation, StoreCounts
from warmers.templates import Messages, RenderOptions

REGISTER_S = 15.0
POLL_S = 0.25
ENGINE_NICE = 10
"""An engine takes every core; at equal priority its daemon answers pings and lookups too late, and Valkey too."""


@dataclass(frozen=True, slots=True)
class HttpReplica:
    """A vLLM engine and its LMCache daemon by their addresses. Satisfies warmers.replica.Replica."""

    engine: VllmEngine
    daemon: LmcacheDaemon
    fresh: bool = field(default=False)

    def daemon_identity(self) -> DaemonIdentity:
        """What the daemon says of itself."""
        return self.daemon.identity()

    def forget(self) -> None:
        """Drop L0 and L1."""
        self.engine.forget()
        self.daemon.forget()

    def generate(
        self, ids: TokenIds, *, max_tokens: int, salt: str | None = None, adapter: str | None = None
    ) -> Generation:
        """Stream a greedy completion."""
        return self.engine.generate(ids, max_tokens=max_tokens, salt=salt, adapter=adapter)

    def chat_ids(
        self, messages: Messages, options: RenderOptions, salt: str | None, adapter: str | None = None
    ) -> TokenIds | None:
        """Prompt ids of a chat request."""
        return self.engine.chat_ids(messages, options, salt, adapter)

    def counters(self) -> Counters:
        """VLLM's prompt tokens by source, LMCache's lookups."""
        return Counters(**self.engine.prompt_tokens(), **self.daemon.lookups())

    def stores(self) -> StoreCounts:
        """The daemon's L2 writes."""
        return self.daemon.stores()

    def close(self) -> None:
        """Close its connections; the processes stay."""
        self.engine.close()
        self.daemon.close()


@dataclass(frozen=True)
class LocalReplicas:
    """Satisfies warmers.replica.ReplicaFactory."""

    stack: LocalStack
    settings: LocalSettings
    weights: LocalWeights
    tier: Tier
    """Where its KV goes; what is embedded is started when it is needed."""
    on_event: OnEvent = print

    @property
    def processes(self) -> Processes:
        """The stack's, which hold engine and daemon too."""
        return self.stack.processes

    @contextmanager
    def warmer(self, fleet: Fleet) -> Iterator[HttpReplica]:
        """The running replica, else a new one; left running. Nobody replaces it while the block lasts."""
        with self._hold(fleet, fresh=False) as replica:
            yield replica

    @contextmanager
    def cold(self, fleet: Fleet) -> Iterator[HttpReplica]:
        """A replica that has served nothing yet: the running one if that is so, else a new one; left running."""
        with self._hold(fleet, fresh=True) as replica:
            yield replica

    @contextmanager
    def _hold(self, fleet: Fleet, *, fresh: bool) -> Iterator[HttpReplica]:
        self._require_engine()
        with self.processes.in_use() as use:
            use.share()
            with self.processes.locked():
                url = self.tier.ensure()
                replica = self._attach(fleet, url, fresh=fresh)
            if replica is None:
                use.alone(self.on_event)
                with self.processes.locked():  # another run that waited may have started the very one
                    replica = self._attach(fleet, url, fresh=fresh) or self._start(fleet, url)
                use.share()
            with closing(replica):
                try:
                    yield replica
                except EngineLost:
                    self._discard(use)
                    raise

    def _discard(self, use: InUse) -> None:
        """End an engine that gave no answer, and its daemon, unless others use them; the next who asks gets new ones.

        vLLM 0.32 hangs for five minutes, and then dies, when its daemon is killed in the middle of a store and comes
        back at once: it would be handed out, healthy by its own word, to every run until then.
        """
        if not use.try_alone():
            self.on_event("the engine gave no answer: leaving it to the other run that uses it")
            return
        self.on_event("the engine gave no answer: ending it, the next run starts another")
        with self.processes.locked():
            for name in ("engine", "daemon"):
                self.processes.stop(name)

    def running(self, fleet: Fleet) -> HttpReplica | None:
        """The running replica, if there is a healthy one of exactly this fleet; starts nothing."""
        return self._attach(fleet, self.tier.address())

    def _require_engine(self) -> None:
        """Raise ConfigError before anything is started."""
        python = self.settings.engine_python
        for program in (python, python.with_name("lmcache")):
            if not program.exists():
                raise ConfigError(
                    "starting an engine", seen=f"there is no {program}", do="Run make, or set local.engine_python."
                )

    def _attach(self, fleet: Fleet, store: str, *, fresh: bool = False) -> HttpReplica | None:
        """The running replica if it is the fleet's and healthy, and has served nothing where `fresh` is asked for."""
        engine, daemon = self.processes.running("engine"), self.processes.running("daemon")
        if engine is None or daemon is None or {engine.spec, daemon.spec} != {self._spec(fleet, store)}:
            return None
        replica = self._replica(fleet, engine.url, daemon.url)
        if replica.engine.healthy() and replica.daemon.healthy() and self._registered(replica, fleet):
            untouched = replica.counters().untouched
            if untouched or not fresh:
                return replace(replica, fresh=untouched)
        replica.close()
        return None

    def _registered(self, replica: HttpReplica, fleet: Fleet) -> bool:
        """Whether the daemon knows the engine; after a daemon's restart it takes vLLM a few heartbeats to say hello."""
        if replica.engine.identity().connector == "":
            return True  # it never will, and `require_match` says so
        deadline = time.monotonic() + REGISTER_S
        while fleet.model.path not in replica.daemon_identity().engines:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def _spec(self, fleet: Fleet, store: str) -> str:
        model = [fleet.model.served_name, fleet.model.tokenizer_digest]
        adapters = [[adapter.path, adapter.salt] for adapter in fleet.adapters]
        shaping = [fleet.namespace, *model, fleet.ttl_s, fleet.engine.max_model_len, adapters]
        whole = json.dumps([*shaping, self.settings.model_dump(mode="json"), store])
        return sha256(whole.encode()).hexdigest()[:16]

    def _replica(self, fleet: Fleet, engine: str, daemon: str, fresh: bool = False) -> HttpReplica:
        timeout = fleet.limits.request_timeout_s
        return HttpReplica(VllmEngine(engine, fleet.model.served_name, timeout), LmcacheDaemon(daemon), fresh)

    def _start(self, fleet: Fleet, store: str) -> HttpReplica:
        """Start daemon and engine together and wait for both."""
        for name in ("engine", "daemon"):
            self.processes.stop(name)
        if self.weights.directory is not None:
            self._link_model(fleet, self.weights.directory)
        elif not fleet.model.stage_uri and not Path(fleet.model.path).is_dir():
            raise ConfigError(
                f"starting an engine of fleet {fleet.name!r}",
                seen=f"there is no {fleet.model.path}",
                do="Mount the root of the stages at model.mount (README, Weights), or leave it out to stream.",
            )
        spec, (zmq, *ports) = self._spec(fleet, store), free_ports(3)
        daemon_url, engine_url = (f"http://{HOST}:{port}" for port in ports)
        shm = f"warmfront-{os.getpid()}-{zmq}"
        env = {**ENGINE_ENV, "OMP_NUM_THREADS": str(max(1, self.settings.threads // fleet.engine.tensor_parallel))}
        env["VLLM_CPU_KVCACHE_SPACE"] = str(self.settings.kv_space_gb)
        self.processes.start(
            "daemon",
            daemon_argv(fleet, self.settings, daemon_url, self.tier.adapter(fleet, store), zmq, shm),
            url=daemon_url,
            spec=spec,
            env=env | self.tier.environment(),
            shm=shm,
        )
        argv = engine_argv(fleet, self.settings, engine_url, zmq)
        if self.weights.embedded:
            self.stack.ensure()
        env |= self.weights.environment(self.stack.s3_url() if self.weights.embedded else "", fleet.model.assets_cache)
        if fleet.adapters:
            env["WARMFRONT_SALTS"] = str(self._put_salts(fleet))
        self.processes.start("engine", argv, url=engine_url, spec=spec, env=env, nice=ENGINE_NICE)
        replica = self._replica(fleet, engine_url, daemon_url, fresh=True)
        timeout = self.settings.start_timeout_s
        self.processes.wait("daemon", replica.daemon.healthy, timeout, self.on_event)
        self.processes.wait("engine", replica.engine.healthy, timeout, self.on_event)
        self._require_adapters(fleet)
        return replica

    def _require_adapters(self, fleet: Fleet) -> None:
        """Raise SourceChanged where the engine may have loaded other weights than the table of salts is for."""
        for adapter in fleet.adapters:
            if read_adapter(adapter.name, Path(adapter.path)) != adapter:
                self.processes.stop("engine")
                raise SourceChanged(
                    f"starting an engine of fleet {fleet.name!r}",
                    seen=f"the files of LoRA adapter {adapter.name!r} became others meanwhile",
                    do="Run again once they stay as they are.",
                )

    def _put_salts(self, fleet: Fleet) -> Path:
        """Write the table that the engine's middleware reads; where it is."""
        path = self.processes.directory / "salts.json"
        scratch = path.with_suffix(".new")
        scratch.write_bytes(fleet.salt_table)
        scratch.replace(path)
        return path

    def _link_model(self, fleet: Fleet, directory: Path) -> None:
        """Make the model available under the path that carries its digest."""
        link = Path(fleet.model.path)
        link.parent.mkdir(parents=True, exist_ok=True)
        scratch = link.with_name(f".{link.name}.{os.getpid()}")
        scratch.unlink(missing_ok=True)
        scratch.symlink_to(directory)
        scratch.replace(link)
