"""Jobs: runs of the chain for one fleet.

Steps of a job run in one process, one after the other: they share one engine, and a process for each would
cost more than it isolates. Whole runs are never retried by Dagster; a rerun is cheap and asked for.
"""

from functools import partial

import dagster as dg

from assets.cache import hit_rate, warm_chunks, warm_plan
from assets.lifecycle import l2_inventory, l2_retention
from assets.partitions import fleets
from assets.prompts import configuration_is_valid, prompt_prefixes, templates_are_readable
from assets.serving import hot_set
from assets.weights import model_weights, weights_retention

_job = partial(dg.define_asset_job, tags={"dagster/max_retries": "0"}, executor_def=dg.in_process_executor)
_fleet_job = partial(_job, partitions_def=fleets)

stage_weights = _fleet_job(
    "stage_weights",
    selection=dg.AssetSelection.assets(model_weights),
    description="Copy a fleet's model into S3, verify it, and make it the one that engines stream. Safe to run again: "
    "what is there is not sent. Started by a sensor when the source has another revision.",
)

warm = _fleet_job(
    "warm",
    selection=dg.AssetSelection.assets(prompt_prefixes, warm_plan, warm_chunks, hit_rate, hot_set)
    | dg.AssetSelection.checks(configuration_is_valid, templates_are_readable),
    description="Render a fleet's templates, plan, prefill what is missing from L2, prove it on a cold replica, and "
    "have serving replicas load it. "
    "Safe to run again: what is in L2 already is not computed. Started by two sensors and each night.",
)

prove = _fleet_job(
    "prove",
    selection=dg.AssetSelection.assets(hit_rate, hot_set),
    description="Take the proof again, of what is in L2 now. Computes only its own cold controls; run it after the "
    "engine or L2 was touched.",
)

take_stock = _fleet_job(
    "take_stock",
    selection=dg.AssetSelection.assets(l2_inventory, l2_retention),
    description="Compare L2 with the ledger, and extend the life of what a plan needs. Started each hour; removes "
    "nothing.",
)

retain = _fleet_job(
    "retain",
    selection=dg.AssetSelection.assets(weights_retention, l2_inventory, l2_retention),
    description="Say which chunks, namespaces and stages of weights nobody needs. Removes them when launched with "
    "`apply: true`, and only then.",
)

read_templates = _job(
    "read_templates",
    selection=dg.AssetSelection.checks(templates_are_readable),
    description="Look whether every template can be read, and say so on `prompt_templates`. Starts no engine.",
)
