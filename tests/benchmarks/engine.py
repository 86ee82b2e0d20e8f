"""One real engine for all benchmarks that need one: vLLM, LMCache and Valkey with the sample model and prompts.

It has a state directory of its own. Whatever is to be cold on it gets a `cache_salt` that nothing was stored under, or
L0 and L1 are dropped before.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from resources.config import load_settings
from resources.replicas import HttpReplica
from resources.settings import Settings
from resources.workspace import Workspace
from warmers.fleet import Fleet
from warmers.identity import require_match
from warmers.plan import WarmPlan
from warmers.prefixes import PrefixSet
from warmers.replica import Counters
from warmers.stage import stage
from warmers.warm import WarmResult, warm

EMBEDDED = Path("deploy/local/warmfront.yaml")
SETTLE_S = 10.0
"""How long counters and writes may lag behind."""


@dataclass(frozen=True, slots=True)
class Warmed:
    """One warm, and the tokens that vLLM itself counted as computed meanwhile."""

    plan: WarmPlan
    result: WarmResult
    computed_tokens: int


@dataclass(frozen=True, slots=True)
class WarmEngine:
    """A running engine, the prefixes of the sample prompts, and how they were warmed on it."""

    workspace: Workspace
    fleet: Fleet
    replica: HttpReplica
    prefixes: PrefixSet
    first: Warmed

    def warm(self, prefixes: PrefixSet) -> Warmed:
        """As the asset `warm_chunks` does."""
        return _warm(self.workspace, self.fleet, self.replica, prefixes)

    def settled(self, done: Callable[[], bool]) -> bool:
        """Wait for something that lags behind; whether it came."""
        return _settled(self.workspace, done)


@contextmanager
def warm_engine(directory: Path) -> Iterator[WarmEngine]:
    """Start it, warm the sample prompts, end it. Raises where the model or the engine environment is missing."""
    with _engine_on(_config(directory)) as engine:
        yield engine


@contextmanager
def engine_on_files(directory: Path) -> Iterator[WarmEngine]:
    """The same with L2 in a directory."""
    with _engine_on(_configured(directory, "fs")) as engine:
        yield engine


@contextmanager
def engine_on_plugin(directory: Path) -> Iterator[WarmEngine]:
    """The same with L2 in a Valkey with TLS, through warmfront's adapter as a user with a password."""
    with _engine_on(_configured(directory, "plugin")) as engine:
        yield engine


@contextmanager
def _engine_on(config: Path) -> Iterator[WarmEngine]:
    workspace = Workspace(config, on_event=lambda message: print(message, file=sys.stderr, flush=True))
    try:
        settings = workspace.fleet_settings()
        source, stages = workspace.source(settings.name), workspace.open_stages()
        with workspace.stage_lease(settings.model.name) as fence:
            stage(source, settings.model.name, stages, fence, workspace.clock.now)
        fleet = workspace.fleet()
        with workspace.replicas(fleet.name).warmer(fleet) as replica:
            require_match(fleet, replica.engine.identity(), replica.daemon_identity())
            prefixes = workspace.find_prefixes(fleet, workspace.templates(fleet), replica.engine)
            first = _warm(workspace, fleet, replica, prefixes)
            yield WarmEngine(workspace, fleet, replica, prefixes, first)
    finally:
        workspace.stack.down()


def embedded_settings(directory: Path) -> Settings:
    """The embedded configuration with a state of its own. Raises where the engine environment is missing."""
    settings = load_settings(EMBEDDED.absolute())
    if not settings.local.engine_python.exists():
        raise RuntimeError(f"there is no engine environment {settings.local.engine_python}: run `make`")
    local = settings.local.model_copy(update={"directory": directory})
    return settings.model_copy(update={"state": str(directory), "local": local})


def _config(directory: Path) -> Path:
    path = directory / "warmfront.yaml"
    path.write_text(embedded_settings(directory).model_dump_json())
    return path


def _configured(directory: Path, l2: str) -> Path:
    """As `make demo L2=...` writes it, with its state in `directory`."""
    path = directory.with_name(f"{directory.name}.yaml")
    argv = [sys.executable, "deploy/local/configure.py", str(path), "--l2", l2]
    subprocess.run(argv, check=True)
    return path


def _warm(workspace: Workspace, fleet: Fleet, replica: HttpReplica, prefixes: PrefixSet) -> Warmed:
    before = replica.counters()
    with workspace.lease(fleet.namespace) as fence:
        plan = workspace.plan(fleet, prefixes)
        journal, store = workspace.state.journal(fleet.namespace), workspace.store(fleet.name)
        result = warm(plan, replica, store, journal, fence, workspace.clock)
    _settled(workspace, lambda: _computed(replica, before) >= result.computed_tokens)
    return Warmed(plan, result, _computed(replica, before))


def _computed(replica: HttpReplica, before: Counters) -> int:
    return (replica.counters() - before).computed


def _settled(workspace: Workspace, done: Callable[[], bool]) -> bool:
    deadline = workspace.clock.now() + SETTLE_S
    while not done():
        if workspace.clock.now() > deadline:
            return False
        workspace.clock.sleep(0.05)
    return True
