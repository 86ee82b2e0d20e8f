"""The proof: requests on a cold replica hit what was warmed, by two independent counts, and answer the same.

`observe` acts on a replica, `judge` decides on what was observed. Present in L2 is not proven: see
`warmers/presence.py`.

For each prefix, in this order: L2 samples, each after L0 and L1 were dropped; the same request again (an
L0 hit of the loaded KV); a cold control, the same tokens under a salt of its own; the control again (an L0 hit
of KV that this engine computed itself); and a chat request, for the token ids that users' requests get.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

import numpy as np

from warmers.errors import EngineUnavailable, PermanentError
from warmers.fleet import ProofFloors
from warmers.keys import KeyLayout, TokenIds, chunk_keys
from warmers.lease import Fence
from warmers.ledger import Journal, Rows, rows_of
from warmers.plan import WarmPlan
from warmers.prefixes import Prefix, Template
from warmers.presence import KVStore
from warmers.replica import Clock, Counters, Generation, Replica

Verdict = Literal["proven", "failed", "inconclusive"]

QUESTION_TOKENS = 16
"""Tokens behind the warmed chunks in a sample, computed each time: short, so that TTFT is the prefix's."""
SETTLE_S = 5.0
"""How long vLLM's counters may lag behind an answer."""
LOOKUP_SETTLE_S = 1.0
"""How long LMCache's may lag behind those; it counts in a thread of its own."""
POLL_S = 0.02
TRIES = 3
"""For a sample in which LMCache was not asked: vLLM's connector takes a daemon that is slow to answer one ping for
gone, and recomputes for a moment. Such a sample says nothing of L2."""
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


@dataclass(frozen=True, slots=True)
class PrefixProof:
    """The verdict on one prefix."""

    label: str
    verdict: Verdict
    reason: str
    expected_tokens: int
    hit_tokens: int
    """The least over all samples and both counts."""
    ttft_cold_s: float
    ttft_warm_s: float
    output_unchanged: bool

    @property
    def speedup(self) -> float:
        """Cold over warm time to first token."""
        return self.ttft_cold_s / self.ttft_warm_s if self.ttft_warm_s else 0.0


@dataclass(frozen=True, slots=True)
class Proof:
    """The verdict on a fleet's namespace."""

    fleet: str
    namespace: str
    verdict: Verdict
    reasons: tuple[str, ...]
    prefixes: tuple[PrefixProof, ...]
    fresh: bool
    floors: ProofFloors
    at: float

    @property
    def expected_tokens(self) -> int:
        """Over all proven prefixes, each once."""
        return sum(p.expected_tokens for p in self.prefixes)

    @property
    def hit_tokens(self) -> int:
        """Of the expected ones."""
        return sum(p.hit_tokens for p in self.prefixes)

    @property
    def hit_rate(self) -> float:
        """Hit over expected tokens."""
        return self.hit_tokens / self.expected_tokens if self.expected_tokens else 0.0

    @property
    def output_unchanged(self) -> bool:
        """Of every prefix."""
        return bool(self.prefixes) and all(p.output_unchanged for p in self.prefixes)

    @property
    def ttft_cold_s(self) -> float:
        """Median over prefixes."""
        return median(p.ttft_cold_s for p in self.prefixes) if self.prefixes else 0.0

    @property
    def ttft_warm_s(self) -> float:
        """Median over prefixes of each one's median."""
        return median(p.ttft_warm_s for p in self.prefixes) if self.prefixes else 0.0

    @property
    def speedup(self) -> float:
        """Median over prefixes of cold over warm TTFT."""
        return median(p.speedup for p in self.prefixes) if self.prefixes else 0.0


def choose(plan: WarmPlan, ledger: Rows) -> list[int]:
    """Prefixes to prove in this run, of those that are whole in L2.

    Never proven since they were warmed before proven long ago, then heavy, then long ones.
    """
    current = np.where(ledger.proven_at >= ledger.warmed_at, ledger.proven_at, 0.0)
    proven = dict(zip(ledger.chunk_ids(), current.tolist(), strict=True))

    def rank(number: int) -> tuple[float, float, int]:
        keys = ((plan.tree.salts[c], plan.tree.hashes[c].tobytes().hex()) for c in plan.tree.paths[number])
        oldest = min(proven.get(key, 0.0) for key in keys)
        return oldest, -plan.prefixes[number].weight, -plan.prefixes[number].shared

    whole = [n for n, path in enumerate(plan.tree.paths) if len(path) and not plan.missing_of(n)]
    return sorted((n for n in whole if plan.twin_of(n) is None), key=rank)[: plan.fleet.floors.max_prefixes]


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
        floors, ids = self.plan.fleet.floors, sample_ids(prefix)
        salt = prefix.salt or None
        hits = tuple(self.cold_sample(ids, salt) for _ in range(floors.samples))
        reload = self.sample(ids, salt).answer
        controls = tuple(self.control(ids, f"{CONTROL}{number}") for number in range(floors.controls))
        last = f"{CONTROL}{floors.controls - 1}"
        return PrefixObservation(
            label=prefix.label,
            expected_tokens=prefix.full_tokens,
            hits=hits,
            reload=reload,
            controls=controls,
            control_reload=self.sample(ids, last).answer,
            chat_tokens_equal=self.chat_equals(prefix, template, last),
        )

    def cold_sample(self, ids: TokenIds, salt: str | None) -> Sample:
        """One that finds neither L0 nor L1."""
        for _ in range(TRIES):
            if not self.virgin:
                self.replica.forget()
            self.virgin = False
            sample = self.sample(ids, salt)
            if sample.counted.asked:
                break
        return sample

    def control(self, ids: TokenIds, salt: str) -> Sample:
        """The same tokens under a salt that nothing is stored under, also if an earlier proof was killed here."""
        keys = self.keys(ids, salt)
        self.store.delete(keys)
        self.replica.forget()
        self.controls += keys
        return self.sample(ids, salt)

    def sample(self, ids: TokenIds, salt: str | None) -> Sample:
        """One request, and what was counted for it once both counts have settled."""
        floors = self.plan.fleet.floors
        before = self.replica.counters()
        answer = self.replica.generate(ids, max_tokens=floors.output_tokens, salt=salt)
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
        ids = self.replica.chat_ids(template.renderings[0], template.options, salt)
        if ids is None:
            return None
        self.controls += [key for key in self.keys(ids, salt) if key not in self.controls]
        return bool(np.array_equal(ids[: prefix.shared], prefix.ids))

    def keys(self, ids: TokenIds, salt: str) -> list[str]:
        return list(chunk_keys(ids, KeyLayout.of(self.plan.fleet), salt))

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


def judge(observations: Observations, floors: ProofFloors) -> Proof:
    """Decide: *failed* when anything contradicts the promise, *inconclusive* when it could not be seen."""
    prefixes = tuple(_judge_prefix(seen, observations.dtype, floors) for seen in observations.prefixes)
    judged: list[PrefixProof | Unproven] = [*prefixes, *observations.unproven]
    reasons = [f"{p.label}: {p.reason}" for p in judged if p.verdict != "proven"]
    verdict: Verdict = "proven"
    if any(p.verdict == "failed" for p in judged):
        verdict = "failed"
    elif reasons:
        verdict = "inconclusive"
    elif not prefixes:
        verdict, reasons = "inconclusive", ["there is no prefix to prove: no template fills a chunk"]
    elif not observations.fresh:
        verdict, reasons = "inconclusive", ["no sample came from a newly started engine and daemon"]
    return Proof(
        fleet=observations.fleet,
        namespace=observations.namespace,
        verdict=verdict,
        reasons=tuple(reasons),
        prefixes=prefixes,
        fresh=observations.fresh,
        floors=floors,
        at=observations.at,
    )


def _judge_prefix(seen: PrefixObservation, dtype: str, floors: ProofFloors) -> PrefixProof:
    by_vllm = [sample.counted.external for sample in seen.hits]
    by_lmcache = [sample.counted.found_l2 for sample in seen.hits]
    unchanged = _output_unchanged(seen, dtype)
    verdict: Verdict = "proven"
    reason = ""
    if not all(sample.counted.asked for sample in seen.hits):
        verdict = "inconclusive"
        reason = "vLLM did not ask LMCache: it runs without its connector, or took the daemon for gone; prove again"
    elif by_vllm != by_lmcache:
        verdict = "inconclusive"
        reason = f"vLLM counts {by_vllm} tokens loaded, LMCache {by_lmcache} found in L2: the two must agree"
    elif any(_cached(control.counted) for control in seen.controls):
        verdict, reason = "inconclusive", "the cold control hit a cache, so there is nothing to compare with"
    elif min(by_vllm) < floors.hit_rate * seen.expected_tokens:
        verdict = "failed"
        reason = f"hit {min(by_vllm)} of {seen.expected_tokens} tokens from L2; warm again, then look at L2's evictions"
    elif seen.chat_tokens_equal is None:
        verdict, reason = "inconclusive", "the ids of a chat request were not seen; does the template still exist?"
    answers = [seen.reload, seen.control_reload, *(s.answer for s in (*seen.hits, *seen.controls))]
    if not all(len(answer.output) == floors.output_tokens and answer.ttft_s > 0 for answer in answers):
        verdict, reason = "inconclusive", "the engine did not return the generated token ids (return_token_ids)"
    if seen.chat_tokens_equal is False:
        verdict = "failed"
        reason = "a chat request gets other token ids than were warmed; render again (tokenizer or template changed?)"
    if not unchanged:
        verdict = "failed"
        reason = "the answer with KV from L2 differs from the cold one: KV of other weights or layout; do not roll out"
    return PrefixProof(
        label=seen.label,
        verdict=verdict,
        reason=reason,
        expected_tokens=seen.expected_tokens,
        hit_tokens=min(by_vllm + by_lmcache),
        ttft_cold_s=median(control.answer.ttft_s for control in seen.controls),
        ttft_warm_s=median(sample.answer.ttft_s for sample in seen.hits),
        output_unchanged=unchanged,
    )


def _cached(counted: Counters) -> int:
    return counted.external + counted.local_hit + counted.found_l1 + counted.found_l2


def _output_unchanged(seen: PrefixObservation, dtype: str) -> bool:
    """Whether loaded KV answers as computed KV does.

    In float32 a hit equals a cold run to the token. In 16 bits a cold run rounds differently from any hit,
    vLLM's own L0 hit included (seen with 250 M parameters), so the control's L0 hit counts as well.
    """
    outputs = {sample.answer.output for sample in seen.hits} | {seen.reload.output}
    truths = {control.answer.output for control in seen.controls}
    if dtype != "float32":
        truths.add(seen.control_reload.output)
    return len(outputs) == 1 and outputs <= truths


def prove(
    plan: WarmPlan,
    templates: Mapping[str, Template],
    replica: Replica,
    store: KVStore,
    journal: Journal,
    fence: Fence,
    clock: Clock,
    on_event: Callable[[str], None] = lambda _: None,
) -> Proof:
    """Choose, observe, judge, and write into the ledger what was proven. Raises EngineUnavailable, LeaseLost."""
    chosen = choose(plan, journal.rows())
    proof = judge(observe(plan, chosen, templates, replica, store, clock, on_event), plan.fleet.floors)
    fence.check()
    journal.record(rows_of(plan, proven_chunks(plan, proof), proven_at=proof.at))
    return proof


def proven_chunks(plan: WarmPlan, proof: Proof) -> list[int]:
    """Chunks of the prefixes that a proof found proven."""
    labels = {p.label for p in proof.prefixes if p.verdict == "proven"}
    paths = [path for prefix, path in zip(plan.prefixes, plan.tree.paths, strict=True) if prefix.label in labels]
    return sorted({chunk for path in paths for chunk in path.tolist()})
