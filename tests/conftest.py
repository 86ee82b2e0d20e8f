"""Fleet names are partitions, fixed when assets are imported: the same for all tests."""

import os
from pathlib import Path

os.environ["WARMFRONT_CONFIG"] = str(Path(__file__).parent / "data" / "fleets.yaml")
os.environ.pop("DAGSTER_HOME", None)
