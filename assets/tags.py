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
    if PROCESS_TAG not in context.run.tags:
        context.instance.add_run_tags(context.run.run_id, {PROCESS_TAG: identity_of(os.getpid())})
