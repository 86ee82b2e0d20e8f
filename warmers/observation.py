"""What a cold replica did when it was asked: samples, controls, and what two processes counted for each.

For each prefix, in this order: L2 samples, each after L0 and L1 were dropped; the same request again (an
L0 hit of the loaded KV); a cold control, the same tokens under a salt of its own; the control again (an L0 hit
of KV that this engine computed itself); and a chat request, for the token ids that users' requests get.
Deciding what it means belongs in `warmers/proof.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from warmers.errors import EngineUnavailable, PermanentError
from warmers.keys import KeyLayout, TokenIds, chunk_keys
from warmers.plan import WarmPlan
from warmers.prefixes import Prefix
from warmers.presence import KVStore
from warmers.replica import Clock, Counters, Generation, Replica
from warmers.salts import combined
from warmers.templates import Template

Verdict = Literal["proven", "failed", "inconclusive"]

QUESTION_TOKENS = 16
"""Tokens behind the warmed chunks in a sample, computed each time: short, so that TTFT is the prefix's."""
SETTLE_S = 5.0
"""How long vLLM's counters may lag behind an answer."""
LOOKUP_SETTLE_S = 1.0
"""How long LMCache's may lag behind those; it counts in a thread of its own."""
POLL_S = 0.02
TRIES = 3
"""For a sample that says nothing of L2: LMCache was not asked (vLLM's connector takes a daemon that is slow to answer
one ping for gone, and recomputes for a moment), or a late write had filled L1 again."""
CONTROL = "warmfront-control-"
"""Salt of the cold controls, by number: the next proof finds and deletes what a killed one left."""
CLEANUP_S = 5.0
"""How long the control's chunks may take to appear in L2, where they are deleted."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One request and what both processes counted for it."""

    answer: Generation
    counted: Counters


@dataclass(frozen=True, slots=True)
class PrefixObservation:
    """Everything seen of one prefix."""

    label: str
    expected_tokens: int
    """Tokens in full chunks: what a request has to hit."""
    hits: tuple[Sample, ...]
    """From L2."""
    reload: Generation
    """The same request right after the last hit: L0."""
    controls: tuple[Sample, ...]
    """Cold, under one-off salts."""
    control_reload: Generation
    """The last control again: L0, computed by this engine."""
    chat_tokens_equal: bool | None
    """Whether a chat request started with the prefix's ids; None where that was not seen."""


@dataclass(frozen=True, slots=True)
class Unproven:
    """A prefix that was not observed to its end, and why."""

    label: str
    reason: str
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Observations:
    """One visit to a cold replica."""

    fleet: str
    namespace: str
    dtype: str
    fresh: bool
    """The first sample was the first request of a newly started engine and daemon."""
    prefixes: tuple[PrefixObservation, ...]
    unproven: tuple[Unproven, ...]
    at: float


def observe(
    plan: WarmPlan,
    chosen: Sequence[int],
    templates: Mapping[str, Template],
    replica: Replica,
    store: KVStore,
    clock: Clock,
    on_event: Callable[[str], None] = lambda _: None,
) -> Observations:
    """Take samples and controls of the chosen prefixes on a cold replica; the controls' keys are deleted.

    A prefix that the engine refuses is reported and harms no other. Raises EngineUnavailable when the engine goes
    away, or its counters do not settle after an answer.
    """
    fresh = replica.fresh and replica.counters().untouched
    visit = _Visit(plan, replica, store, clock, virgin=fresh)
    seen, unproven = [], []
    for number in chosen:
        prefix = plan.prefixes[number]
        try:
            seen.append(visit.prefix(prefix, templates.get(prefix.label)))
        except PermanentError as error:
            unproven.append(Unproven(prefix.label, str(error), "failed"))
        finally:
            visit.delete_controls()
        on_event(f"{prefix.label}: observed")
    for number, prefix in enumerate(plan.prefixes):
        if missing := plan.missing_of(number):
            reason = f"{missing} of its {prefix.chunks} chunks are not in L2; warm again"
            unproven.append(Unproven(prefix.label, reason, "inconclusive"))
    return Observations(
        fleet=plan.fleet.name,
        namespace=plan.fleet.namespace,
        dtype=plan.fleet.engine.dtype,
        fresh=fresh,
        prefixes=tuple(seen),
        unproven=tuple(unproven),
        at=clock.now(),
    )


@dataclass(slots=True)
class _Visit:
    """One stay on a replica: whether it has been asked anything yet, and the control keys not yet deleted."""

    plan: WarmPlan
    replica: Replica
    store: KVStore
    clock: Clock
    virgin: bool
    controls: list[str] = field(default_factory=list)

    def prefix(self, prefix: Prefix, template: Template | None) -> PrefixObservation:
        floors = self.plan.fleet.floors
        hits = tuple(self.cold_sample(prefix) for _ in range(floors.samples))
        reload = self.sample(prefix, prefix.salt).answer
        controls = tuple(self.control(prefix, f"{CONTROL}{number}") for number in range(floors.controls))
        last = f"{CONTROL}{floors.controls - 1}"
        return PrefixObservation(
            label=prefix.label,
            expected_tokens=prefix.full_tokens,
            hits=hits,
            reload=reload,
            controls=controls,
            control_reload=self.sample(prefix, last).answer,
            chat_tokens_equal=self.chat_equals(prefix, template, last),
        )

    def cold_sample(self, prefix: Prefix) -> Sample:
        """One that finds neither L0 nor L1."""
        for _ in range(TRIES):
            if not self.virgin:
                self.replica.forget()
            self.virgin = False
            sample = self.sample(prefix, prefix.salt)
            if sample.counted.asked and not (sample.counted.found_l1 or sample.counted.local_hit):
                break
        return sample

    def control(self, prefix: Prefix, salt: str) -> Sample:
        """The same tokens under a salt that nothing is stored under, also if an earlier proof was killed here."""
        keys = self.keys(prefix, salt)
        self.store.delete(keys)
        self.replica.forget()
        self.controls += keys
        return self.sample(prefix, salt)

    def sample(self, prefix: Prefix, salt: str) -> Sample:
        """One request under a salt, and what was counted for it once both counts have settled."""
        ids = sample_ids(prefix)
        floors = self.plan.fleet.floors
        before = self.replica.counters()
        answer = self.replica.generate(ids, max_tokens=floors.output_tokens, salt=salt or None, adapter=prefix.adapter)
        looked_up = len(ids) // self.plan.fleet.engine.chunk_tokens * self.plan.fleet.engine.chunk_tokens
        deadline = self.clock.now() + SETTLE_S
        lookup_deadline = self.clock.now() + LOOKUP_SETTLE_S
        while True:
            counted, now = self.replica.counters() - before, self.clock.now()
            by_vllm = counted.computed + counted.local_hit + counted.external
            if by_vllm >= answer.prompt_tokens and (counted.asked >= looked_up or now > lookup_deadline):
                return Sample(answer, counted)
            if now > deadline:
                raise EngineUnavailable(
                    f"proving fleet {self.plan.fleet.name!r}",
                    seen=f"vLLM answered {answer.prompt_tokens} prompt tokens, and {SETTLE_S:g} s later its metrics "
                    f"count {by_vllm}",
                    do="Look at /metrics of the engine; prove again.",
                )
            self.clock.sleep(POLL_S)

    def chat_equals(self, prefix: Prefix, template: Template | None, salt: str) -> bool | None:
        """Asked under the control's salt: computed from its KV, and what it stores goes with the control."""
        if template is None:
            return None
        ids = self.replica.chat_ids(template.renderings[0], template.options, salt, prefix.adapter)
        if ids is None:
            return None
        self.controls += [key for key in self.keys(prefix, salt, ids) if key not in self.controls]
        return bool(np.array_equal(ids[: prefix.shared], prefix.ids))

    def keys(self, prefix: Prefix, salt: str, ids: TokenIds | None = None) -> list[str]:
        """Of its sample, or of other `ids`, under a salt."""
        asked = sample_ids(prefix) if ids is None else ids
        return list(chunk_keys(asked, KeyLayout.of(self.plan.fleet), combined(prefix.adapter_salt, salt)))

    def delete_controls(self) -> None:
        """Delete the controls' chunks once LMCache has written them; what comes later still has the TTL."""
        deadline = self.clock.now() + CLEANUP_S
        while self.controls and (self.store.sizes(self.controls) < 0).any() and self.clock.now() < deadline:
            self.clock.sleep(POLL_S)
        if self.controls:
            self.store.delete(self.controls)
            self.controls.clear()


def sample_ids(prefix: Prefix) -> TokenIds:
    """The prefix's full chunks and a short question, less than a chunk: asking stores no new chunk."""
    question = min(QUESTION_TOKENS, prefix.chunk_tokens - 1, len(prefix.rendered) - prefix.full_tokens)
    ids = prefix.rendered[: prefix.full_tokens + question]
    return ids if question else np.append(ids, ids[-1])
