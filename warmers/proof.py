"""The proof: requests on a cold replica hit what was warmed, by two independent counts, and answer the same.

`judge` decides on what `warmers/observation.py` saw. Present in L2 is not proven: see `warmers/presence.py`.
"""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np

from warmers.fleet import ProofFloors
from warmers.lease import Fence
from warmers.ledger import Journal, Rows, rows_of
from warmers.observation import Observations, PrefixObservation, Unproven, Verdict, observe
from warmers.plan import WarmPlan
from warmers.presence import KVStore
from warmers.replica import Clock, Counters, Replica
from warmers.templates import Template


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


def choose(plan: WarmPlan, ledger: Rows, templates: Container[str]) -> list[int]:
    """Prefixes to prove in this run, of those that are whole in L2 and whose template can be read.

    Never proven since they were warmed before proven long ago, then heavy, then long ones.
    """
    current = np.where(ledger.proven_at >= ledger.warmed_at, ledger.proven_at, 0.0)
    proven = dict(zip(ledger.chunk_ids(), current.tolist(), strict=True))

    def rank(number: int) -> tuple[float, float, int]:
        oldest = min(proven.get(plan.tree.chunk_id(chunk), 0.0) for chunk in plan.tree.paths[number])
        return oldest, -plan.prefixes[number].weight, -plan.prefixes[number].shared

    whole = [n for n, path in enumerate(plan.tree.paths) if len(path) and not plan.missing_of(n)]
    known = [n for n in whole if plan.prefixes[n].label in templates]
    return sorted((n for n in known if plan.twin_of(n) is None), key=rank)[: plan.fleet.floors.max_prefixes]


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
    chosen = choose(plan, journal.rows(), templates)
    proof = judge(observe(plan, chosen, templates, replica, store, clock, on_event), plan.fleet.floors)
    fence.check()
    journal.record(rows_of(plan, proven_chunks(plan, proof), proven_at=proof.at))
    return proof


def proven_chunks(plan: WarmPlan, proof: Proof) -> list[int]:
    """Chunks of the prefixes that a proof found proven."""
    labels = {p.label for p in proof.prefixes if p.verdict == "proven"}
    paths = [path for prefix, path in zip(plan.prefixes, plan.tree.paths, strict=True) if prefix.label in labels]
    return sorted({chunk for path in paths for chunk in path.tolist()})
