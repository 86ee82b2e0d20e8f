"""Chapter one: from template files to the token ids that requests share."""

from typing import TYPE_CHECKING

import dagster as dg

from assets.partitions import fleets
from assets.reporting import ONCE_MORE, OWNERS, failures, listed, place, table, telling
from assets.tags import DATA_VERSION_TAG, tag_process
from assets.weights import model_weights
from resources.workspace import Workspace
from warmers.errors import ConfigError, StoreUnavailable, WarmfrontError

if TYPE_CHECKING:
    from warmers.prefixes import PrefixSet

prompt_templates = dg.AssetSpec(
    "prompt_templates",
    description="The prompt templates of a fleet: files that people edit, here or in S3. Nobody materializes them; the "
    "sensor `prompt_templates_changed` looks every 15 s, and their digest is the data version.",
    group_name="prompts",
    partitions_def=fleets,
    owners=OWNERS,
    kinds={"file"},
)


@dg.asset(
    deps=[prompt_templates, model_weights],
    partitions_def=fleets,
    group_name="prompts",
    owners=OWNERS,
    kinds={"vllm"},
    retry_policy=ONCE_MORE,
)
def prompt_prefixes(
    context: dg.AssetExecutionContext, workspace: dg.ResourceParam[Workspace]
) -> dg.MaterializeResult[None]:
    """For each template and context the exact token ids that every request shares, rendered by the engine itself.

    Whatever varies from request to request ends the prefix, and `note` names it. A prefix shorter than a chunk can
    never hit. Templates that did not change are not rendered again.
    """
    with failures():
        here = telling(workspace, context)
        fleet = here.fleet(context.partition_key)
        prompts = here.templates(fleet)
        with here.replicas(fleet.name).warmer(fleet) as replica:
            found = here.find_prefixes(fleet, prompts, replica.engine)
        uri = here.state.save_prefixes(fleet.name, found, {"templates": prompts.digest, "turns_at": found.turns_at})
        here.state.save_listing(fleet.name, prompts.listing, "rendered")
        here.state.save_listing(fleet.name, prompts.listing)
    context.log_event(
        dg.AssetObservation(
            prompt_templates.key,
            partition=fleet.name,
            metadata={
                "templates": len(prompts.listing.templates),
                "broken": len(prompts.listing.broken),
                "source": place(str(here.prompts(fleet.name).objects)),
            },
            tags={DATA_VERSION_TAG: prompts.digest},
        )
    )
    return dg.MaterializeResult(
        data_version=dg.DataVersion(prompts.digest),
        metadata={
            "templates": len(found.found),
            "shared_tokens": sum(p.shared for p in found.prefixes),
            "too_short": len(found.too_short),
            "failed": len(found.failed),
            "prefixes_document": place(uri),
            "prefixes": table(_rows(found)),
        },
    )


@dg.asset_check(asset=prompt_templates.key, partitions_def=fleets)
def configuration_is_valid(
    context: dg.AssetCheckExecutionContext, workspace: dg.ResourceParam[Workspace]
) -> dg.AssetCheckResult:
    """warmfront.yaml is complete and every path in it exists. A broken field is named, with what to write there.

    L2, where it answers, lets us in and takes what is written.
    """
    from warmers.keys import KeyLayout

    tag_process(context)
    l2 = "takes what is written"
    try:
        fleet = workspace.fleet(context.partition_key)
        workspace.store(fleet.name).require_writable(KeyLayout.of(fleet).start)
    except ConfigError as error:
        return dg.AssetCheckResult(passed=False, description=str(error))
    except StoreUnavailable as error:  # no matter of configuration: who needs it next says so, and is retried
        l2 = str(error)
    return dg.AssetCheckResult(passed=True, metadata={"namespace": fleet.namespace, "l2": l2})


@dg.asset_check(asset=prompt_templates.key, partitions_def=fleets)
def templates_are_readable(
    context: dg.AssetCheckExecutionContext, workspace: dg.ResourceParam[Workspace]
) -> dg.AssetCheckResult:
    """Every template file can be read. One that cannot is named, stays warm as it last was, and harms no other."""
    tag_process(context)
    try:
        source = workspace.prompts(context.partition_key)
        listing = source.read(workspace.state.listing(context.partition_key)).listing
        broken = list(listing.broken.values())
        if not listing.templates and not broken:
            broken = [f"There is no template in {source.objects}: put one there, or correct prompts.include."]
    except WarmfrontError as error:
        broken = [str(error)]
    return dg.AssetCheckResult(
        passed=not broken,
        severity=dg.AssetCheckSeverity.WARN,
        description=listed(broken),
        metadata={"broken": len(broken)},
    )


@dg.asset_check(asset=prompt_prefixes, partitions_def=fleets, blocking=True, retry_policy=ONCE_MORE)
def tokens_match_engine(
    context: dg.AssetCheckExecutionContext, workspace: dg.ResourceParam[Workspace]
) -> dg.AssetCheckResult:
    """The engine renders every prefix to the same ids on each of its paths: tokenize, and chat.

    Blocks: where they differ, what would be warmed is not what users ask for.
    """
    from warmers.prefixes import PrefixSet, mismatches

    with failures():
        here = telling(workspace, context)
        fleet = here.fleet(context.partition_key)
        prompts = here.templates(fleet)
        found = here.prefixes(fleet) or PrefixSet()
        with here.replicas(fleet.name).warmer(fleet) as replica:
            wrong = mismatches(found.prefixes, prompts.by_label(), replica.engine)
        if wrong:
            here.state.forget(fleet.name, "prefixes")
    return dg.AssetCheckResult(
        passed=not wrong,
        description=f"The engine now renders otherwise: {', '.join(wrong)}. Its tokenizer or chat template is not "
        "that of the model directory. Correct one of them and run again: everything is rendered anew."
        if wrong
        else None,
        metadata={"compared": min(len(found.prefixes), 32)},
    )


@dg.asset_check(asset=prompt_prefixes, partitions_def=fleets)
def prefix_is_stable(
    context: dg.AssetCheckExecutionContext, workspace: dg.ResourceParam[Workspace]
) -> dg.AssetCheckResult:
    """Nothing that changes from request to request stands before the part that users write. Only warns.

    A date or an id early in a prompt ends what can be shared there; the template and the place are named.
    """
    from warmers.prefixes import PrefixSet

    with failures():
        found = workspace.state.prefixes(context.partition_key) or PrefixSet()
    lost = [f"{p.label}: {variation}" for p in found.found for variation in p.unstable]
    broken = [f"{f.template}: {f.reason}" for f in found.failed]
    return dg.AssetCheckResult(
        passed=not lost and not broken,
        severity=dg.AssetCheckSeverity.WARN,
        description=f"{listed([*lost, *broken])}\nMove what varies behind what does not." if lost or broken else None,
        metadata={"too_short": table({"template": p.label, "tokens_short": p.short_by} for p in found.too_short)},
    )


def _rows(found: "PrefixSet") -> list[dict[str, str | int]]:
    broken: list[dict[str, str | int]] = [
        {"template": f.template, "shared_tokens": 0, "chunks": 0, "tail_tokens": 0, "note": f.reason}
        for f in found.failed
    ]
    return broken + [
        {
            "template": p.label,
            "shared_tokens": p.shared,
            "chunks": p.chunks,
            "tail_tokens": p.tail_tokens,
            "note": "; ".join(map(str, p.unstable)) or (f"{p.short_by} tokens short of a chunk" if p.short_by else ""),
        }
        for p in sorted(found.found, key=lambda p: (not p.unstable, not p.short_by))
    ]
