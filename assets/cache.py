"""Chapter two: from a plan to chunks in L2 to the proof that a cold replica hits them."""

import json
from typing import TYPE_CHECKING, Any

import dagster as dg

from assets.partitions import fleets
from assets.pictures import ttft_picture
from assets.prompts import prompt_prefixes
from assets.reporting import ONCE_MORE, OWNERS, documents, failures, listed, plan_rows, proof_rows, table, telling
from resources.documents import plan_document, proof_document, warm_document
from resources.workspace import Workspace
from warmers.errors import StateUnavailable
from warmers.identity import require_match

if TYPE_CHECKING:
    from warmers.fleet import Fleet
    from warmers.plan import WarmPlan
    from warmers.prefixes import PrefixSet
    from warmers.warm import WarmProgress

NEXT_STEP = {
    "failed": "Put this right and run the job `warm`; roll nothing out before it is proven.",
    "inconclusive": "Neither proven nor disproved: put this right and run the job `warm`; `prove` is enough where "
    "every chunk is in L2.",
}
NOT_SEEN = "No prefix could be asked for: the check `hit_rate_above_floor` says why."


@dg.asset(
    deps=[prompt_prefixes],
    partitions_def=fleets,
    group_name="cache",
    owners=OWNERS,
    kinds={"valkey"},
    retry_policy=ONCE_MORE,
)
def warm_plan(context: dg.AssetExecutionContext, workspace: dg.ResourceParam[Workspace]) -> dg.MaterializeResult[None]:
    """What has to be prefilled, in which order and at what cost: what should be in L2 less what is there already.

    Prefixes that lack most come first; `steps` is 0 when nothing changed. Read it before a large run: nothing is
    computed here.
    """
    with failures():
        here = telling(workspace, context)
        fleet = here.fleet(context.partition_key)
        plan = here.plan(fleet, _prefixes(here, fleet))
        here.state.point(fleet.name, "plan", plan_document(plan), ".json", {"namespace": fleet.namespace})
    return dg.MaterializeResult(
        metadata={
            "compute_tokens": plan.compute_tokens,
            "store_bytes": plan.store_bytes,
            "missing_chunks": plan.missing_chunks,
            "steps": len(plan.steps),
            "engine_seconds": round(plan.engine_seconds, 1) if plan.engine_seconds is not None else "not measured yet",
            "namespace": fleet.namespace,
            **documents(here, fleet.name, fleet.namespace),
            "plan": table(plan_rows(plan.rows())),
        }
    )


@dg.asset(
    deps=[warm_plan],
    partitions_def=fleets,
    group_name="cache",
    owners=OWNERS,
    kinds={"vllm", "valkey"},
    retry_policy=ONCE_MORE,
)
def warm_chunks(
    context: dg.AssetExecutionContext, workspace: dg.ResourceParam[Workspace]
) -> dg.MaterializeResult[None]:
    """The plan carried out: what was missing is prefilled once by the warmer, and is in L2 on every rank.

    Safe to run again at any time: the plan is made anew from what L2 holds now, so what is there costs nothing.
    `refused` names prefixes that the engine would not take, and why.
    """
    from warmers.warm import warm

    def tell(progress: "WarmProgress") -> None:
        here.on_event(
            f"warmed {progress.chunks} of {progress.total_chunks} chunks, {progress.computed_tokens:,} tokens computed "
            f"in {progress.seconds:.0f} s"
        )

    with failures():
        here = telling(workspace, context)
        fleet = here.fleet(context.partition_key)
        with here.lease(fleet.namespace) as fence, here.replicas(fleet.name).warmer(fleet) as replica:
            require_match(fleet, replica.engine.identity(), replica.daemon_identity())
            here.holdings(fleet).note_namespace()
            plan = here.plan(fleet, _prefixes(here, fleet))
            journal = here.state.journal(fleet.namespace)
            result = warm(plan, replica, here.store(fleet.name), journal, fence, here.clock, tell)
            rate = result.tokens_per_s or fleet.prefill_tokens_per_s
            fence.check()
            document = warm_document(plan, result)
            here.state.point(fleet.name, "warm", document, ".json", {"tokens_per_s": rate, "at": here.clock.now()})
    return dg.MaterializeResult(
        metadata={
            "computed_tokens": result.computed_tokens,
            "requests": result.requests,
            "chunks_warmed": result.chunks,
            "chunks_already_there": result.already_there,
            "chunks_repaired": result.repaired_chunks,
            "bytes_warmed": result.chunks * fleet.chunk_bytes * fleet.engine.tensor_parallel,
            "seconds": round(result.seconds, 2),
            "tokens_per_s": round(rate or 0.0, 1),
            **documents(here, fleet.name, fleet.namespace),
            "refused": table({"prefix": label, "reason": reason} for label, reason in result.failed),
        }
    )


@dg.asset(
    deps=[warm_chunks],
    partitions_def=fleets,
    group_name="cache",
    owners=OWNERS,
    kinds={"vllm", "valkey"},
    retry_policy=ONCE_MORE,
)
def hit_rate(context: dg.AssetExecutionContext, workspace: dg.ResourceParam[Workspace]) -> dg.MaterializeResult[None]:
    """The proof: a cold replica hits the warmed chunks, by two independent counts, and answers the same.

    `picture` shows what users gain: time to first token without and with the warmed chunks. Where the verdict is not
    `proven`, `reasons` and the check `hit_rate_above_floor` name the prefix and what to do.
    """
    from warmers.proof import prove

    with failures():
        here = telling(workspace, context)
        fleet = here.fleet(context.partition_key)
        templates = here.templates(fleet).by_label()
        with here.lease(fleet.namespace) as fence, here.replicas(fleet.name).cold(fleet) as replica:
            require_match(fleet, replica.engine.identity(), replica.daemon_identity())
            plan = here.plan(fleet, _prefixes(here, fleet))
            journal, store = here.state.journal(fleet.namespace), here.store(fleet.name)
            proof = prove(plan, templates, replica, store, journal, fence, here.clock, here.on_event)
            of = (here.state.latest(fleet.name, "prefixes") or {}).get("templates")
            document, weights = proof_document(proof), fleet.model.weights_digest
            keys = {"namespace": fleet.namespace, "keyspace": fleet.keyspace}
            summary = {"verdict": proof.verdict, "at": proof.at, "weights": weights, **keys}
            here.state.point(fleet.name, "proof", document, ".json", {**summary, "templates": of})
            if proof.verdict == "proven":
                here.state.point(fleet.name, "proven", document, ".json", summary)
            rows = json.loads(document)["prefixes"]
    return dg.MaterializeResult(
        metadata={
            "verdict": proof.verdict,
            "reasons": listed(proof.reasons) or "none",
            "hit_rate": proof.hit_rate,
            "hit_tokens": proof.hit_tokens,
            "expected_tokens": proof.expected_tokens,
            "ttft_cold_s": round(proof.ttft_cold_s, 4),
            "ttft_warm_s": round(proof.ttft_warm_s, 4),
            "ttft_speedup": round(proof.speedup, 2),
            "picture": dg.MetadataValue.md(ttft_picture(rows)),
            **documents(here, fleet.name, fleet.namespace),
            "proof": table(proof_rows(rows)),
        }
    )


@dg.asset_check(asset=warm_chunks, partitions_def=fleets, blocking=True, retry_policy=ONCE_MORE)
def every_chunk_present(
    context: dg.AssetCheckExecutionContext, workspace: dg.ResourceParam[Workspace]
) -> dg.AssetCheckResult:
    """Every chunk is in L2 with its right size, on every rank: asked anew, before the proof.

    `left_out` is what a cap deferred or the engine refused: it fails nothing here, and keeps its prefix from being
    proven.
    """
    with failures():
        here = telling(workspace, context)
        fleet = here.fleet(context.partition_key)
        plan = here.plan(fleet, _prefixes(here, fleet))
        warmed = here.state.document(fleet.name, "warm") or {}
    left_out = warmed.get("deferred_chunks", 0) + warmed.get("refused_chunks", 0)
    return dg.AssetCheckResult(
        passed=plan.missing_chunks <= left_out,
        description=_missing(plan) if plan.missing_chunks else None,
        metadata={"chunks": len(plan.tree.hashes), "missing": plan.missing_chunks, "left_out": left_out},
    )


@dg.asset_check(asset=hit_rate, partitions_def=fleets, blocking=True, retry_policy=ONCE_MORE)
def hit_rate_above_floor(
    context: dg.AssetCheckExecutionContext, workspace: dg.ResourceParam[Workspace]
) -> dg.AssetCheckResult:
    """The proof came out `proven`: of every prefix the share of tokens hit from L2 reaches the fleet's floor.

    Blocks what comes after it. What failed is named by prefix, with what to do.
    """
    proof = _proof(workspace, context.partition_key)
    return dg.AssetCheckResult(
        passed=proof["verdict"] == "proven",
        description=f"{listed(proof['reasons'])}\n\n{NEXT_STEP[proof['verdict']]}" if proof["reasons"] else None,
        metadata={"hit_rate": proof["hit_rate"], "floor": proof["floors"]["hit_rate"], "verdict": proof["verdict"]},
    )


@dg.asset_check(asset=hit_rate, partitions_def=fleets, blocking=True, retry_policy=ONCE_MORE)
def output_unchanged(
    context: dg.AssetCheckExecutionContext, workspace: dg.ResourceParam[Workspace]
) -> dg.AssetCheckResult:
    """Answers from warmed KV are those that a cold run gives. Where this fails, users get wrong answers."""
    proof = _proof(workspace, context.partition_key)
    changed = [p["label"] for p in proof["prefixes"] if not p["output_unchanged"]]
    said = None if proof["prefixes"] else NOT_SEEN
    if changed:
        said = (
            f"Answers changed for {', '.join(changed)}: KV of other weights or layout in this namespace. "
            "Do not roll out; warm under a new namespace."
        )
    return dg.AssetCheckResult(
        passed=proof["output_unchanged"],
        description=said,
        metadata={"compared": len(proof["prefixes"]), "changed": len(changed)},
    )


@dg.asset_check(asset=hit_rate, partitions_def=fleets)
def ttft_speedup_above_floor(
    context: dg.AssetCheckExecutionContext, workspace: dg.ResourceParam[Workspace]
) -> dg.AssetCheckResult:
    """A warm time to first token is as many times shorter than a cold one as the fleet asks for. Only warns."""
    proof = _proof(workspace, context.partition_key)
    floor = proof["floors"]["ttft_speedup"]
    slow = [f"{p['label']} {p['speedup']:.1f} x" for p in proof["prefixes"] if p["speedup"] < floor]
    said = None if proof["prefixes"] else NOT_SEEN
    if slow:
        said = f"Below {floor:g} x: {', '.join(slow)}. Look at L2's latency, or drop short prefixes."
    return dg.AssetCheckResult(
        passed=proof["speedup"] >= floor,
        severity=dg.AssetCheckSeverity.WARN,
        description=said,
        metadata={"ttft_speedup": round(proof["speedup"], 2), "floor": floor},
    )


def _prefixes(workspace: Workspace, fleet: "Fleet") -> "PrefixSet":
    found = workspace.prefixes(fleet)
    if found is None:
        raise StateUnavailable(
            f"reading the prefixes of fleet {fleet.name!r}",
            seen="none were found yet",
            do="Materialize prompt_prefixes.",
        )
    return found


def _proof(workspace: Workspace, fleet: str) -> dict[str, Any]:
    with failures():
        proof = workspace.state.document(fleet, "proof")
        if proof is None:
            raise StateUnavailable(f"reading the proof of fleet {fleet!r}", seen="there is none", do="Prove it first.")
    return proof


def _missing(plan: "WarmPlan") -> str:
    worst = sorted((row for row in plan.rows() if row.missing), key=lambda row: -row.missing)[:5]
    rows = ", ".join(f"{row.label} ({row.missing} of {row.chunks})" for row in worst)
    many = f"{plan.missing_chunks} chunks are" if plan.missing_chunks > 1 else "1 chunk is"
    return f"{many} missing: {rows}. Warm again; if they go missing again, look at L2's memory."
