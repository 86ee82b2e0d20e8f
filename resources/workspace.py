"""Everything a run needs for a fleet, built from warmfront.yaml when it is first asked for.

The one place that knows which adapter a setting means. Assets and the command line get a Workspace, tests
another one. Imports no adapter before it is needed, since Dagster loads this module.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote
from zoneinfo import ZoneInfo

from resources.config import build_fleet, config_path, load_settings, local_directory
from resources.settings import FleetSettings, Settings
from resources.system_clock import SystemClock
from warmers.errors import ConfigError

if TYPE_CHECKING:
    from resources.capacity import Capacity
    from resources.holdings import Holdings
    from resources.local_stack import LocalStack
    from resources.prompts import Prompts, PromptSource
    from resources.replica_commands import LocalWeights
    from resources.replicas import HttpReplica, LocalReplicas
    from resources.stages import BucketStages
    from resources.state import StateStore
    from resources.streamer import RunaiStreamer
    from resources.tiers import Tier
    from warmers.fleet import Fleet, Model
    from warmers.lease import Fence
    from warmers.plan import ChunkTree, WarmPlan
    from warmers.prefixes import Engine, PrefixSet
    from warmers.presence import KVStore, Presence
    from warmers.retention import Decision
    from warmers.weights import WeightSource

LEASE_TTL_S = 30.0
STAGING_S = 86_400.0
"""How long a stager waits for another one of the same model."""
EMBEDDED_STAGES = "s3://warmfront"
PROOFS = {"proof": "tried", "proven": "proven"}


@dataclass(frozen=True)
class Workspace:
    """Adapters by fleet."""

    path: Path
    on_event: Callable[[str], None] = print

    @classmethod
    def from_environment(cls, on_event: Callable[[str], None] = print) -> "Workspace":
        """By WARMFRONT_CONFIG, else ./warmfront.yaml, else the embedded default."""
        return cls(config_path(), on_event)

    def telling(self, on_event: Callable[[str], None]) -> "Workspace":
        """The same, with another place for progress."""
        return replace(self, on_event=on_event)

    @cached_property
    def settings(self) -> Settings:
        """The checked file. Raises ConfigError."""
        return load_settings(self.path)

    @cached_property
    def state(self) -> "StateStore":
        """The state store."""
        from resources.state import open_state

        return open_state(self.settings.state)

    @cached_property
    def clock(self) -> SystemClock:
        """Real time."""
        return SystemClock()

    @property
    def local_directory(self) -> Path:
        """Where things live that need a disk of this machine: the local stack, links to models."""
        return local_directory(self.path)

    @cached_property
    def stack(self) -> "LocalStack":
        """The embedded stack."""
        from resources.local_stack import LocalStack

        return LocalStack(self.local_directory / "stack", self.on_event)

    def fleet_settings(self, name: str | None = None) -> FleetSettings:
        """A fleet's settings; None: the only fleet."""
        return self.settings.fleet(name)

    def fleet(self, name: str | None = None) -> "Fleet":
        """A fleet, with the prefill rate that its last run measured. Raises ConfigError before its model is staged."""
        settings = self.fleet_settings(name)
        last = self.state.latest(settings.name, "warm") or {}
        fleet = build_fleet(settings, self.model(settings), last.get("tokens_per_s"))
        if fleet.store == "s3":  # LMCache's adapter has no prefix: the namespace is in the model's path instead
            return replace(fleet, model=self.model(settings, fleet.namespace))
        return fleet

    def model(self, settings: FleetSettings, namespace: str = "") -> "Model":
        """What a fleet serves: its directory, or the current stage of its source. `namespace`: to be in its path."""
        from resources.model_files import read_model

        if settings.model.directory is not None:
            served = self.local_directory / "served"
            model = read_model(settings.model.directory, settings.model.name, served)
            return replace(model, path=str(served / namespace)) if namespace else model
        from resources.staged_models import Loading, last_stage, read_stage

        name, directory = settings.model.name, self.local_directory / "stages"
        cache = settings.model.assets_cache or str(self.local_directory / "assets")
        loading = Loading(f"{cache}/{namespace}".rstrip("/"), settings.model.mount)
        if self.settings.weights is None and self.stack.processes.running("s3") is None:
            return last_stage(name, directory, loading)
        return read_stage(self.stages(), name, directory, loading)

    def stages(self) -> "BucketStages":
        """Where stages are. Raises BucketUnavailable where that is the embedded stack and it does not run."""
        from resources.stages import BucketStages

        if self.settings.weights is not None:
            return BucketStages.at(self.settings.weights)
        return BucketStages.at(EMBEDDED_STAGES, self.stack.s3_url())

    def open_stages(self) -> "BucketStages":
        """The same, ready to be written to: the embedded one is started, and its bucket made."""
        if self.settings.weights is None:
            with self.stack.processes.locked():
                self.stack.ensure()
        stages = self.stages()
        if self.settings.weights is None:
            stages.make_bucket()
        return stages

    def keeps_stages(self, name: str) -> bool:
        """Whether the model may have stages: it has a source, or there is a bucket that other fleets may use."""
        return self.fleet_settings(name).model.source is not None or self.settings.weights is not None

    def stage_lease(self, model: str) -> "AbstractContextManager[Fence]":
        """Hold a model's stages. A second stager waits for the first, and then finds its work done."""
        from resources.leases import StateLease

        name = f"weights-{quote(model, safe='')}"
        return StateLease(self.state.objects, self.clock).hold(name, LEASE_TTL_S, STAGING_S, self.on_event)

    def weights_needed(self, model: str) -> dict[str, str]:
        """Digests of the stages of a model that have to stay, and who needs each."""
        needed, current = dict[str, str](), self.stages().current(model)
        if current is not None:
            needed[current["digest"]] = "replicas that start load it"
        for fleet in (fleet for fleet in self.settings.fleets if fleet.model.name == model):
            for kind in ("proof", "proven"):
                weights = (self.state.latest(fleet.name, kind) or {}).get("weights")
                if weights is not None:
                    needed.setdefault(weights, f"fleet {fleet.name} was last {PROOFS[kind]} with it")
        return needed

    def decide_weights(self, name: str) -> "tuple[Decision, ...]":
        """What is to happen to the stages of a fleet's model; the most careful of the fleets that serve it counts."""
        from warmers.retention import Keep, decide

        model = self.fleet_settings(name).model.name
        serving = [fleet.model for fleet in self.settings.fleets if fleet.model.name == model]
        keep = Keep.most_careful([Keep(each.keep_revisions, each.keep_days) for each in serving])
        return decide(self.stages().staged(model), self.weights_needed(model), keep, self.clock.now())

    def source(self, name: str) -> "WeightSource":
        """Where the fleet's weights come from. Raises ConfigError where it serves a directory as it is."""
        from resources.weight_sources import open_source

        settings = self.fleet_settings(name)
        if settings.model.source is None:
            raise ConfigError(
                f"staging the weights of fleet {name!r}",
                seen="model.directory is served as it is",
                do="Give model.source instead: a directory, hf://org/name@revision or s3://bucket/prefix.",
            )
        return open_source(settings.model.source)

    def source_digest(self, name: str) -> str:
        """Of a source's files by their versions, unread; 16 hex digits. Raises WeightsError, SourceUnavailable."""
        source = self.source(name)
        versions = sorted((file.name, file.bytes, file.version) for file in source.files())
        return sha256(repr((str(source), source.resolve(), versions)).encode()).hexdigest()[:16]

    def prompts(self, name: str) -> "PromptSource":
        """Where the fleet's templates come from."""
        from resources.objects import open_objects
        from resources.prompts import PromptSource

        prompts = self.fleet_settings(name).prompts
        return PromptSource(open_objects(prompts.directory), prompts.include)

    def templates(self, fleet: "Fleet") -> "Prompts":
        """The fleet's templates, and those with a clock as they read at present. Raises SourceUnavailable."""
        from resources.clocks import present
        from warmers.templates import without_adapter

        before, rendered = self.state.listing(fleet.name), self.state.listing(fleet.name, "rendered")
        prompts = self.prompts(fleet.name).read(before, rendered)
        failed = without_adapter(prompts.templates, fleet.adapters)
        now = datetime.fromtimestamp(self.clock.now(), ZoneInfo(self.fleet_settings(fleet.name).prompts.timezone))
        unserved = {one.template for one in failed}
        templates = [template for template in prompts.templates if template.label not in unserved]
        whole = (*templates, *present(templates, fleet.model, now))
        return replace(prompts, templates=whole, failed=(*prompts.failed, *failed))

    def tier(self, name: str) -> "Tier":
        """The fleet's L2, as its settings have it."""
        from resources.tiers import open_tier

        return open_tier(self.fleet_settings(name).l2, self.stack)

    def store(self, name: str) -> "KVStore":
        """The fleet's L2. Raises StoreUnavailable where it is embedded and does not run."""
        return self.tier(name).store()

    def replicas(self, name: str) -> "LocalReplicas":
        """Where the fleet's replicas come from."""
        from resources.replicas import LocalReplicas

        weights = self._weights(self.fleet_settings(name))
        return LocalReplicas(self.stack, self.settings.local, weights, self.tier(name), self.on_event)

    def _weights(self, settings: FleetSettings) -> "LocalWeights":
        from resources.replica_commands import LocalWeights

        if settings.model.directory is not None:
            return LocalWeights(settings.model.directory)
        return LocalWeights(embedded=self.settings.weights is None)

    def streamer(self, name: str) -> "RunaiStreamer | None":
        """What the fleet's engines stream weights with; None where they do not, or none could run on this machine."""
        from resources.streamer import RunaiStreamer

        settings = self.fleet_settings(name)
        if settings.model.source is None or settings.model.mount is not None:
            return None
        embedded = self.settings.weights is None
        s3_url, cache = self.stack.s3_url() if embedded else "", self.fleet(name).model.assets_cache
        environment = self._weights(settings).environment(s3_url, cache)
        streamer = RunaiStreamer(self.settings.local.engine_python, environment)
        return streamer if streamer.installed else None

    def running(self, fleet: "Fleet") -> "HttpReplica | None":
        """The running local replica of exactly this fleet; None where there is none."""
        return self.replicas(fleet.name).running(fleet)

    def find_prefixes(self, fleet: "Fleet", prompts: "Prompts", engine: "Engine") -> "PrefixSet":
        """The prefixes of all templates; those that did not change since the last set are not rendered again."""
        from resources.model_files import clock_texts
        from warmers.prefixes import PrefixSet, find_prefixes

        shaping = f"{fleet.model.tokenizer_digest} {fleet.engine.vllm} {fleet.engine.chunk_tokens}"
        found = find_prefixes(
            prompts.templates,
            engine,
            chunk_tokens=fleet.engine.chunk_tokens,
            max_model_len=fleet.engine.max_model_len,
            digest_of=lambda template: sha256(f"{shaping} {template.digest}".encode()).hexdigest(),
            last=self.prefixes(fleet) or PrefixSet(),
            clock_texts=partial(clock_texts, fleet.model),
            failed=prompts.failed,
        )
        return found.under(fleet.adapters)

    def prefixes(self, fleet: "Fleet") -> "PrefixSet | None":
        """The latest set that was found, under the salts that the fleet's adapters have now; None before the first."""
        found = self.state.prefixes(fleet.name)
        return found.under(fleet.adapters) if found else None

    def plan(self, fleet: "Fleet", prefixes: "PrefixSet") -> "WarmPlan":
        """Compare what the prefixes need with what L2 holds now."""
        from warmers.plan import plan_warm
        from warmers.presence import look

        store = self.store(fleet.name)

        def look_up(tree: "ChunkTree") -> "Presence":
            return look(store, tree.names, fleet.engine.tensor_parallel, fleet.chunk_bytes)

        return plan_warm(prefixes.prefixes, fleet, look_up)

    def capacity(self, name: str, *, offerings: bool = False) -> "Capacity | None":
        """What the fleet has reserved in EC2, and what could be bought; None where it names no capacity."""
        from resources.capacity import look

        settings = self.fleet_settings(name).capacity
        return None if settings is None else look(settings, self.clock.now(), offerings=offerings)

    def holdings(self, fleet: "Fleet") -> "Holdings":
        """What the fleet has in L2, and what becomes of it."""
        from resources.holdings import Holdings

        return Holdings(self, fleet)

    def lease(self, namespace: str) -> "AbstractContextManager[Fence]":
        """Hold a namespace. Raises LeaseHeld."""
        from resources.leases import StateLease

        return StateLease(self.state.objects, self.clock).hold(namespace, LEASE_TTL_S)
