"""Chapter three: what serving replicas have at hand before they take traffic."""

import dagster as dg

from assets.cache import hit_rate
from assets.partitions import fleets
from assets.reporting import ONCE_MORE, OWNERS, failures, place, table, telling
from resources.workspace import Workspace


@dg.asset(
    deps=[hit_rate],
    partitions_def=fleets,
    group_name="serving",
    owners=OWNERS,
    kinds={"file"},
    retry_policy=ONCE_MORE,
)
def hot_set(context: dg.AssetExecutionContext, workspace: dg.ResourceParam[Workspace]) -> dg.MaterializeResult[None]:
    """What the gates of serving replicas load before they open, and anew whenever this changes: no pod is moved.

    Every live prefix that was proven in the fleet's namespace. Candidates come in when they are promoted.
    """
    from resources.hot_sets import encode, hot_set_path
    from warmers.hot_set import HotSet, servable
    from warmers.prefixes import PrefixSet

    with failures():
        here = telling(workspace, context)
        fleet = here.fleet(context.partition_key)
        path = hot_set_path(fleet.namespace)
        with here.lease(fleet.namespace) as fence:
            found = here.prefixes(fleet) or PrefixSet()
            ledger = here.state.journal(fleet.namespace).rows()
            hot = HotSet.of(fleet, servable(found.prefixes, fleet, ledger))
            fence.check()
            here.state.objects.write(path, encode(hot))
    return dg.MaterializeResult(
        metadata={
            "prefixes": len(hot.prefixes),
            "tokens": sum(len(prefix.ids) for prefix in hot.prefixes),
            "bytes_in_l1": hot.bytes,
            "left_out": len(found.prefixes) - len(hot.prefixes),
            "namespace": fleet.namespace,
            "hot_set": place(here.state.uri_of(path)),
            "hottest": table({"prefix": p.label, "tokens": len(p.ids), "weight": p.weight} for p in hot.prefixes[:50]),
        }
    )
