"""Plans, results and proofs as JSON documents that people read and later commands load."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from warmers.inventory import Inventory
    from warmers.plan import WarmPlan
    from warmers.proof import Proof
    from warmers.warm import WarmResult


def plan_document(plan: "WarmPlan") -> bytes:
    """A plan: totals, a row a prefix, the steps in order."""
    return _encode(plan_summary(plan) | {"steps": [asdict(step) for step in plan.steps]})


def plan_summary(plan: "WarmPlan") -> dict[str, Any]:
    """A plan without its steps."""
    return {
        "fleet": plan.fleet.name,
        "namespace": plan.fleet.namespace,
        "compute_tokens": plan.compute_tokens,
        "store_bytes": plan.store_bytes,
        "engine_seconds": plan.engine_seconds,
        "missing_chunks": plan.missing_chunks,
        "deferred_chunks": plan.deferred_chunks,
        "over_budget": plan.over_budget,
        "prefixes": [asdict(row) for row in plan.rows()],
    }


def warm_document(plan: "WarmPlan", result: "WarmResult") -> bytes:
    """What a run did, beside the plan that it carried out."""
    return _encode(asdict(result) | {"tokens_per_s": result.tokens_per_s, "plan": plan_summary(plan)})


def proof_document(proof: "Proof") -> bytes:
    """A proof with its verdict, floors and a row a prefix."""
    rows = [asdict(row) | {"speedup": row.speedup} for row in proof.prefixes]
    totals = {
        name: getattr(proof, name)
        for name in (
            *("expected_tokens", "hit_tokens", "hit_rate", "output_unchanged"),
            *("ttft_cold_s", "ttft_warm_s", "speedup"),
        )
    }
    return _encode(asdict(proof) | totals | {"prefixes": rows})


def inventory_document(inventory: "Inventory") -> bytes:
    """What L2 holds of what the ledger says."""
    return _encode(asdict(inventory) | {"hit_rate": inventory.hit_rate})


def _encode(document: Any) -> bytes:
    return json.dumps(document, indent=2).encode()
