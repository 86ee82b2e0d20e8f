"""Tags of runs and events: for which fleet, why, and which process executes the run."""

import os

import dagster as dg

from resources.proc import identity_of

FLEET_TAG = "warmfront/fleet"
BECAUSE_TAG = "warmfront/because"
"""What asked for the run, for people."""
PROCESS_TAG = "warmfront/process"
"""The process that executes a run; without it nobody could tell a run whose machine died from one at work."""
PARTITION_TAG = "dagster/partition"
DATA_VERSION_TAG = "dagster/data_version"


def tag_process(context: dg.AssetExecutionContext | dg.AssetCheckExecutionContext) -> None:
    """Say on the run that this process executes it; a run from the command line has it from the start."""
    mine = process_tag(context.run.run_id)
    if context.run.tags.get(PROCESS_TAG) != mine:
        context.instance.add_run_tags(context.run.run_id, {PROCESS_TAG: mine})


def process_tag(run_id: str) -> str:
    """Names the run too: one that is executed again from the UI starts with the tags of its parent."""
    return f"{run_id}@{identity_of(os.getpid())}"


def process_of(run: dg.DagsterRun) -> str | None:
    """The process that executes a run, where it has said so."""
    run_id, _, process = run.tags.get(PROCESS_TAG, "").partition("@")
    return process if run_id == run.run_id else None
