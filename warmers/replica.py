"""A replica: one engine with its LMCache daemon, outside the Service, as warming and proving see it.

Warming, canary and cold replica are one thing. How replicas are started does not belong here
(`resources/replicas.py`).
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from warmers.fleet import Fleet
from warmers.identity import DaemonIdentity
from warmers.keys import TokenIds
from warmers.prefixes import Engine
from warmers.templates import Messages, RenderOptions


class Clock(Protocol):
    """Time as the domain sees it; tests move it."""

    def now(self) -> float:
        """Seconds since the epoch."""

    def sleep(self, seconds: float) -> None:
        """Wait."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One streamed answer."""

    output: tuple[int, ...]
    """Generated token ids."""
    ttft_s: float
    """From sending the request to its first token."""
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Counters:
    """Token counters of one replica, as two independent processes count them."""

    computed: int
    """vLLM: prompt tokens it computed."""
    local_hit: int
    """vLLM: prompt tokens found in L0."""
    external: int
    """vLLM: prompt tokens that the connector loaded."""
    found_l1: int
    """LMCache: tokens found in its DRAM."""
    found_l2: int
    """LMCache: tokens found in L2."""
    asked: int
    """LMCache: tokens looked up."""

    @property
    def untouched(self) -> bool:
        """Whether neither process has seen a prompt since it started."""
        return not any((self.computed, self.local_hit, self.external, self.asked))

    def __sub__(self, other: "Counters") -> "Counters":
        return Counters(*(getattr(self, name) - getattr(other, name) for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """LMCache's L2 writes, in chunks: what it meant to store, and what arrived."""

    submitted: int
    completed: int


class Replica(Protocol):
    """One warm-up engine and its daemon."""

    @property
    def engine(self) -> Engine:
        """The vLLM server."""

    @property
    def fresh(self) -> bool:
        """Whether engine and daemon were started for this replica, or had served no prompt when it was handed out."""

    def daemon_identity(self) -> DaemonIdentity:
        """What the daemon says of itself."""

    def forget(self) -> None:
        """Drop L0 and L1, so that the next request finds KV in L2 or nowhere."""

    def generate(
        self, ids: TokenIds, *, max_tokens: int, salt: str | None = None, adapter: str | None = None
    ) -> Generation:
        """Stream a greedy completion of `ids`, under a LoRA adapter where one is named."""

    def chat_ids(
        self, messages: Messages, options: RenderOptions, salt: str | None, adapter: str | None = None
    ) -> TokenIds | None:
        """Prompt ids that a chat request was served with; None where the engine does not return them."""

    def counters(self) -> Counters:
        """Both processes' token counters now."""

    def stores(self) -> StoreCounts:
        """The daemon's L2 writes so far."""


class ReplicaFactory(Protocol):
    """Where replicas come from."""

    def warmer(self, fleet: Fleet) -> AbstractContextManager[Replica]:
        """A running replica of the fleet's namespace, started when there is none."""

    def cold(self, fleet: Fleet) -> AbstractContextManager[Replica]:
        """A replica whose engine and daemon are newly started."""
