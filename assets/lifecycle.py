"""Chapter three: what becomes of chunks once they are warm."""

from typing import TYPE_CHECKING

import dagster as dg

from assets.cache import warm_chunks, warm_plan
from assets.partitions import fleets
from assets.reporting import ONCE_MORE, OWNERS, Retaining, documents, failures, listed, place, table, telling
from resources.documents import inventory_document
from resources.workspace import Workspace

if TYPE_CHECKING:
    from warmers.inventory import Inventory
    from warmers.life import LifePlan, LifeResult


@dg.asset(
    deps=[warm_chunks],
    partitions_def=fleets,
    group_name="lifecycle",
    owners=OWNERS,
    kinds={"valkey"},
    retry_policy=ONCE_MORE,
)
def l2_inventory(
    context: dg.AssetExecutionContext, workspace: dg.ResourceParam[Workspace]
) -> dg.MaterializeResult[None]:
    """What L2 holds of what was warmed: present, missing, of a wrong size, near its end; and how full it is.

    Computes nothing. `hit_rate` is the share of warmed tokens that a request hits now; where it sank, the next `warm`
    brings back what is missing, and the sensor `prompt_templates_changed` asks for one.
    """
    with failures():
        here = telling(workspace, context)
        fleet = here.fleet(context.partition_key)
        seen = here.holdings(fleet).inventory()
        summary = {"at": seen.at, "evicted_keys": seen.usage.evicted_keys, "hit_rate": seen.hit_rate}
        uri = here.state.point(fleet.name, "inventory", inventory_document(seen), ".json", summary)
    return dg.MaterializeResult(
        metadata={
            "hit_rate": seen.hit_rate,
            "chunks": seen.chunks,
            "present": seen.present,
            "missing": seen.missing,
            "wrong_size": seen.wrong_size,
            "near_end": seen.near_end,
            "needed": seen.needed,
            "held_bytes": seen.held_bytes,
            **_usage(seen),
            "inventory": place(uri),
            **documents(here, fleet.name, fleet.namespace),
            "prefixes": table(
                {"prefix": p.label, "warmed_tokens": p.warmed_tokens, "held_tokens": p.held_tokens}
                for p in seen.prefixes
            ),
        }
    )


@dg.asset_check(asset=l2_inventory, partitions_def=fleets, retry_policy=ONCE_MORE)
def hit_rate_drifted(
    context: dg.AssetCheckExecutionContext, workspace: dg.ResourceParam[Workspace]
) -> dg.AssetCheckResult:
    """What was warmed is still hit, to the fleet's floor. Only warns: the next `warm` brings back what is missing."""
    with failures():
        fleet = workspace.fleet(context.partition_key)
        seen = workspace.state.document(fleet.name, "inventory") or {"hit_rate": 1.0, "prefixes": []}
    lost = [
        f"{p['label']}: {p['held_tokens']:,} of {p['warmed_tokens']:,} warmed tokens are left"
        for p in seen["prefixes"]
        if p["held_tokens"] < p["warmed_tokens"]
    ]
    return dg.AssetCheckResult(
        passed=seen["hit_rate"] >= fleet.floors.hit_rate,
        severity=dg.AssetCheckSeverity.WARN,
        description=f"{listed(lost)}\n\nWarm again; if it goes on, look at L2's memory and evictions."
        if lost
        else None,
        metadata={"hit_rate": seen["hit_rate"], "floor": fleet.floors.hit_rate},
    )


@dg.asset_check(asset=warm_plan, partitions_def=fleets, retry_policy=ONCE_MORE)
def l2_headroom(context: dg.AssetCheckExecutionContext, workspace: dg.ResourceParam[Workspace]) -> dg.AssetCheckResult:
    """L2 has room for what the plan adds, and evicts nothing that is warm. Only warns."""
    from warmers.inventory import headroom_findings

    with failures():
        here = telling(workspace, context)
        usage = here.store(context.partition_key).usage()
        adding = (here.state.document(context.partition_key, "plan") or {}).get("store_bytes", 0)
        last = here.state.document(context.partition_key, "inventory") or {}
    found = headroom_findings(usage, adding, last.get("evicted_since"))
    return dg.AssetCheckResult(
        passed=not found,
        severity=dg.AssetCheckSeverity.WARN,
        description=listed(found),
        metadata={
            "adding_bytes": adding,
            "used_bytes": usage.used_bytes if usage.used_bytes is not None else "not said",
            "capacity_bytes": usage.capacity_bytes if usage.capacity_bytes is not None else "no bound",
        },
    )


@dg.asset(
    deps=[l2_inventory],
    partitions_def=fleets,
    group_name="lifecycle",
    owners=OWNERS,
    kinds={"valkey"},
    retry_policy=ONCE_MORE,
)
def l2_retention(
    context: dg.AssetExecutionContext, config: Retaining, workspace: dg.ResourceParam[Workspace]
) -> dg.MaterializeResult[None]:
    """What a plan needs is extended before half of its life is over; the rest lapses, or is removed.

    Removes nothing unless it is launched with `apply: true`; the tables say what it would. What the current prefixes
    need is never removed, nor what no plan has needed for less than `l2.grace_s`.
    """
    with failures():
        here = telling(workspace, context)
        fleet = here.fleet(context.partition_key)
        holdings = here.holdings(fleet)
        with here.lease(fleet.namespace) as fence:
            plan = holdings.plan_life()
            done = holdings.carry_out(plan, fence, apply=config.apply)
            lapsed = holdings.remove_lapsed(fence, apply=config.apply)
        namespaces = holdings.retire_namespaces(apply=config.apply)
    return dg.MaterializeResult(
        metadata={
            **_done(plan, done),
            "lapsed": lapsed,
            "templates": table(
                {"template": template, "chunks": chunks, "bytes": size, "what": _fate(config.apply)}
                for template, chunks, size in plan.removed_by_template()
            ),
            "namespaces": table(
                {"namespace": d.record.name, "what": _fate(config.apply) if d.remove else "stays", "why": d.why}
                for d in namespaces
            ),
        }
    )


def _fate(applied: bool) -> str:
    return "removed" if applied else "would be removed"


def _done(plan: "LifePlan", done: "LifeResult") -> dict[str, int]:
    return {
        "extended": done.extended,
        "removed": done.removed,
        "removed_bytes": done.removed_bytes,
        "would_remove": len(plan.remove) - done.removed,
        "would_remove_bytes": plan.remove_bytes - done.removed_bytes,
        "spared": done.spared,
    }


def _usage(seen: "Inventory") -> dict[str, int | str]:
    said = {
        "used_bytes": seen.usage.used_bytes,
        "capacity_bytes": seen.usage.capacity_bytes,
        "eviction_policy": seen.usage.eviction_policy,
        "evicted_since": seen.evicted_since,
    }
    return {name: value for name, value in said.items() if value is not None}
