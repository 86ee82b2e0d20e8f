"""The gate beside a serving engine: closed until the replica is warm, so that no user's request is its first.

Warm: every prefix of the hot set that L1 has room for was loaded from L2, the hottest were replayed through the engine
into L0, and a probe hit. A replay is a load, never a prefill: only what was found whole is replayed. Answering probes
over HTTP belongs in `pipelines/gate.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np

from warmers.errors import StateUnavailable, WarmfrontError
from warmers.hot_set import HotPrefix, HotSet
from warmers.keys import TokenIds
from warmers.prefetch import SHARE, Loader, prefetch
from warmers.prefixes import Usage
from warmers.replica import Clock

State = Literal["waiting", "loading", "replaying", "probing", "warm"]
POLL_S = 1.0
"""How often it looks: at the engine, and for another hot set."""
REFRESH_S = 60.0
"""How often all of it is loaded again: what L1 still has costs nothing, and a daemon that was restarted has nothing."""


class GateEngine(Protocol):
    """The engine beside the gate."""

    def healthy(self) -> bool:
        """Whether it takes requests."""

    def prefill(self, ids: TokenIds, salt: str | None, adapter: str | None = None) -> Usage:
        """A request for one token."""


class HotSetSource(Protocol):
    """Where the hot set is."""

    def read(self, known: str | None) -> tuple[HotSet, str] | None:
        """It and its version; None where that is the `known` one, or there is none yet. Raises StateUnavailable."""


@dataclass(frozen=True, slots=True)
class GateLimits:
    """How a gate behaves."""

    l0_tokens: int
    """That are replayed into L0: what the engine's own cache takes without evicting them again."""
    timeout_s: float = 300.0
    """For one load, and one replay."""
    opens_cold_after_s: float | None = None
    """For pods that nobody rolls out: an autoscaler's, a recovery's. None: never, as in canary and waves."""


@dataclass(frozen=True, slots=True)
class GateStatus:
    """What it tells probes and metrics."""

    state: State = "waiting"
    open: bool = False
    reason: str = "starting"
    """Why it is not warm; empty when it is."""
    version: str = ""
    """Of the hot set that was loaded last."""
    loaded_tokens: int = 0
    replayed_tokens: int = 0
    computed_tokens: int = 0
    """That replays had to compute after all: L1 had them, and the engine's connector did not load them."""
    left_out: int = 0
    """Prefixes that L1 has no room for."""
    seconds_to_warm: float | None = None
    cold_opens: int = 0

    @property
    def cold(self) -> bool:
        """Whether it is open and has not been warm yet."""
        return self.open and self.seconds_to_warm is None


class _NotWarm(Exception):
    """Why not, this time."""


class Gate:
    """One gate. `step` is called by one thread; `status` may be read by others."""

    def __init__(
        self,
        engine: GateEngine,
        loader: Loader,
        source: HotSetSource,
        clock: Clock,
        limits: GateLimits,
        on_status: Callable[[GateStatus], None] = lambda _: None,
    ) -> None:
        self.engine, self.loader, self.source = engine, loader, source
        self.clock, self.limits, self.on_status = clock, limits, on_status
        self.status = GateStatus()
        self._began = self._try_at = clock.now()
        self._pause = POLL_S
        self._hot: HotSet | None = None
        self._version: str | None = None
        self._replayed = False

    def step(self) -> None:
        """Go on from where it is, and return after one attempt at most. Call it every POLL_S."""
        try:
            self._look()
            self._require_engine()
            if self._hot is None:
                raise _NotWarm("there is no hot set yet: nothing of this namespace has been proven")
            if self.clock.now() >= self._try_at:
                self._attempt(self._hot)
        except (_NotWarm, WarmfrontError) as error:
            # An open gate stays open: what is lost is speed, and closing would take the replica away as well.
            self._show(replace(self.status, state="waiting", reason=str(error)))
        self._open_cold_when_it_is_time()

    def _look(self) -> None:
        try:
            found = self.source.read(self._version)
        except StateUnavailable:
            if self._hot is None:
                raise
            return  # what it has is good as long as nobody says otherwise
        if found is not None:
            self._hot, self._version = found
            self._try_at, self._pause, self._replayed = self.clock.now(), POLL_S, False

    def _require_engine(self) -> None:
        if not self.engine.healthy():
            self._try_at, self._replayed = self.clock.now(), False  # what it held is gone if it comes back
            raise _NotWarm("the engine takes no requests")

    def _attempt(self, hot: HotSet) -> None:
        """Load, replay, probe. One that fails is repeated after a pause, each time a longer one."""
        self._try_at = self.clock.now() + self._pause
        self._pause = min(2 * self._pause, REFRESH_S)
        self._load(hot)
        if not self._replayed:
            self._replay(hot)
            self._replayed = True
        self._try_at, self._pause = self.clock.now() + REFRESH_S, POLL_S
        first, now = self.status.seconds_to_warm, self.clock.now() - self._began
        seconds = now if first is None else first
        self._show(replace(self.status, state="warm", open=True, reason="", seconds_to_warm=seconds))

    def _load(self, hot: HotSet) -> None:
        if self.status.state != "warm":
            self._show(replace(self.status, state="loading"))
        done = prefetch(hot, self.loader, self.clock, self.limits.timeout_s)
        lacking = [one for one in done.loaded if one.in_l1 < one.keys]
        tokens = sum(one.in_l1 for one in done.loaded) // hot.world_size * hot.chunk_tokens
        left, version = len(done.left_out), self._version or ""
        self._show(replace(self.status, loaded_tokens=tokens, left_out=left, version=version))
        if lacking:
            raise _NotWarm(
                f"L2 lacks something of {len(lacking)} prefixes, {lacking[0].label} has {lacking[0].in_l1} of "
                f"{lacking[0].keys} keys: warm this namespace again"
            )

    def _replay(self, hot: HotSet) -> None:
        """Ask for the hottest that L0 has room for, so that it holds their KV; then for the very hottest once more."""
        self._show(replace(self.status, state="replaying", replayed_tokens=0))
        loaded, _ = hot.within(int(SHARE * self.loader.l1_bytes()))
        chosen, _ = loaded.within(self.limits.l0_tokens // hot.chunk_tokens * hot.chunk_bytes)
        for prefix in chosen.prefixes:
            self._require_hit(prefix)
            tokens = self.status.replayed_tokens + len(prefix.ids)
            self._show(replace(self.status, replayed_tokens=tokens))
        self._show(replace(self.status, state="probing"))
        for prefix in chosen.prefixes[:1]:
            self._require_hit(prefix)

    def _require_hit(self, prefix: HotPrefix) -> None:
        """With one token behind it: vLLM always computes the last one."""
        ids = np.append(prefix.ids, prefix.ids[-1:])
        usage = self.engine.prefill(ids, prefix.salt or None, prefix.adapter)
        if usage.cached_tokens < len(prefix.ids):
            computed = self.status.computed_tokens + len(prefix.ids) - usage.cached_tokens
            self._show(replace(self.status, computed_tokens=computed))
            raise _NotWarm(
                f"the engine computed {prefix.label}: {usage.cached_tokens} of {len(prefix.ids)} tokens came from a "
                "cache (connector in degraded mode, or KV of another namespace?)"
            )

    def _open_cold_when_it_is_time(self) -> None:
        deadline = self.limits.opens_cold_after_s
        late = deadline is not None and self.clock.now() - self._began >= deadline
        if late and not self.status.open and self.engine.healthy():
            self._show(replace(self.status, open=True, cold_opens=self.status.cold_opens + 1))

    def _show(self, status: GateStatus) -> None:
        if status != self.status:
            self.status = status
            self.on_status(status)
