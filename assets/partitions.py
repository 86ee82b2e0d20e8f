"""One partition a fleet. Adding a fleet to warmfront.yaml means reloading the code location."""

import dagster as dg

from resources.config import config_path, fleet_names

fleets = dg.StaticPartitionsDefinition(fleet_names(config_path()))
