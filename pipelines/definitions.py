"""What Dagster loads. Reads warmfront.yaml for fleet names alone; nothing touches the network here."""

import dagster as dg

from assets import cache, capacity, lifecycle, prompts, serving, weights
from pipelines import jobs, schedules, sensors
from resources.workspace import Workspace


def build_defs(workspace: Workspace) -> dg.Definitions:
    """Definitions on a given workspace; tests and the command line bring their own."""
    return dg.Definitions(
        assets=[
            weights.model_weights,
            weights.weights_retention,
            prompts.prompt_templates,
            prompts.prompt_prefixes,
            cache.warm_plan,
            cache.warm_chunks,
            cache.hit_rate,
            serving.hot_set,
            capacity.capacity_windows,
            lifecycle.l2_inventory,
            lifecycle.l2_retention,
        ],
        asset_checks=[
            weights.manifest_complete,
            weights.streamed_tensors_match,
            prompts.configuration_is_valid,
            prompts.templates_are_readable,
            prompts.tokens_match_engine,
            prompts.prefix_is_stable,
            cache.every_chunk_present,
            cache.hit_rate_above_floor,
            cache.output_unchanged,
            cache.ttft_speedup_above_floor,
            lifecycle.hit_rate_drifted,
            lifecycle.l2_headroom,
        ],
        jobs=[jobs.stage_weights, jobs.warm, jobs.prove, jobs.take_stock, jobs.retain, jobs.read_templates],
        schedules=[schedules.nightly_warm, schedules.hourly_stock],
        sensors=[sensors.prompt_templates_changed, sensors.clock_turned, sensors.model_revision_changed],
        resources={"workspace": workspace},
    )


defs = build_defs(Workspace.from_environment(on_event=lambda _: None))
