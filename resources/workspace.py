"""Everything a run needs for a fleet, built from warmfront.yaml when it is first asked for.

The one place that knows which adapter a setting means. Assets and the command line get a Workspace, tests
another one. Imports no adapter before it is needed, since Dagster loads this module.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

from resources.config import FleetSettings, Settings, build_fleet, config_path, load_settings, local_directory
from warmers.errors import ConfigError

if TYPE_CHECKING:
    from resources.kv_store import ValkeyStore
    from resources.local_stack import LocalStack
    from resources.prompts import Prompts, PromptSource
    from resources.replicas import HttpReplica, LocalReplicas
    from resources.state import StateStore
    from warmers.fleet import Fleet
    from warmers.lease import Fence
    from warmers.plan import ChunkTree, WarmPlan
    from warmers.prefixes import Engine, PrefixSet
    from warmers.presence import Presence

LEASE_TTL_S = 30.0


class SystemClock:
    """Satisfies warmers.replica.Clock."""

    def now(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


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
        """A fleet, with the prefill rate that its last run measured."""
        settings = self.fleet_settings(name)
        last = self.state.latest(settings.name, "warm") or {}
        return build_fleet(settings, self.local_directory / "served", last.get("tokens_per_s"))

    def prompts(self, name: str) -> "PromptSource":
        """Where the fleet's templates come from."""
        from resources.objects import open_objects
        from resources.prompts import PromptSource

        prompts = self.fleet_settings(name).prompts
        return PromptSource(open_objects(prompts.directory), prompts.include)

    def templates(self, fleet: "Fleet") -> "Prompts":
        """The fleet's templates, and those with a clock as they read at present. Raises SourceUnavailable."""
        from resources.clocks import present

        prompts = self.prompts(fleet.name).read(self.state.listing(fleet.name))
        now = datetime.fromtimestamp(self.clock.now(), ZoneInfo(self.fleet_settings(fleet.name).prompts.timezone))
        return replace(prompts, templates=(*prompts.templates, *present(prompts.templates, fleet.model, now)))

    def store(self, name: str) -> "ValkeyStore":
        """The fleet's L2. Raises StoreUnavailable where it is the embedded one and does not run."""
        from resources.kv_store import ValkeyStore

        l2 = self.fleet_settings(name).l2
        return ValkeyStore(l2.url or self.stack.valkey_url(), l2.username, l2.password_env)

    def replicas(self, name: str) -> "LocalReplicas":
        """Where the fleet's replicas come from."""
        from resources.replicas import LocalReplicas

        settings = self.fleet_settings(name)
        if settings.l2.password_env is not None:
            raise ConfigError(
                f"starting a local replica of fleet {name!r}",
                seen="l2.password_env is set, and LMCache's valkey adapter takes a password on its command line only",
                do="Use a Valkey on loopback without a password for local replicas.",
            )
        return LocalReplicas(self.stack, self.settings.local, settings.model.directory, settings.l2.url, self.on_event)

    def running(self, fleet: "Fleet") -> "HttpReplica | None":
        """The running local replica of exactly this fleet; None where there is none, or can be none."""
        if self.fleet_settings(fleet.name).l2.password_env is not None:
            return None
        return self.replicas(fleet.name).running(fleet)

    def find_prefixes(self, fleet: "Fleet", prompts: "Prompts", engine: "Engine") -> "PrefixSet":
        """The prefixes of all templates; those that did not change since the last set are not rendered again."""
        from resources.model_files import clock_texts
        from warmers.prefixes import PrefixSet, find_prefixes

        shaping = f"{fleet.model.tokenizer_digest} {fleet.engine.vllm} {fleet.engine.chunk_tokens}"
        return find_prefixes(
            prompts.templates,
            engine,
            chunk_tokens=fleet.engine.chunk_tokens,
            max_model_len=fleet.engine.max_model_len,
            digest_of=lambda template: sha256(f"{shaping} {template.digest}".encode()).hexdigest(),
            last=self.state.prefixes(fleet.name) or PrefixSet(),
            clock_texts=partial(clock_texts, fleet.model),
            failed=prompts.failed,
        )

    def plan(self, fleet: "Fleet", prefixes: "PrefixSet") -> "WarmPlan":
        """Compare what the prefixes need with what L2 holds now."""
        from warmers.plan import plan_warm
        from warmers.presence import look

        store = self.store(fleet.name)

        def look_up(tree: "ChunkTree") -> "Presence":
            return look(store, tree.names, fleet.engine.tensor_parallel, fleet.chunk_bytes)

        return plan_warm(prefixes.prefixes, fleet, look_up)

    def lease(self, namespace: str) -> "AbstractContextManager[Fence]":
        """Hold a namespace. Raises LeaseHeld."""
        from resources.leases import StateLease

        return StateLease(self.state.objects, self.clock).hold(namespace, LEASE_TTL_S)
