"""One partition a fleet. Adding a fleet to warmfront.yaml means reloading the code location."""

import warnings

import dagster as dg

from resources.config import config_path, fleet_names

fleets = dg.StaticPartitionsDefinition(fleet_names(config_path()))

# Partitions on checks are in preview in Dagster 1.13. Without them one fleet's failed check would be overwritten by
# the next fleet's success.
warnings.filterwarnings("ignore", category=dg.PreviewWarning)
