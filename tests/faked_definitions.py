"""What Dagster loads in tests of its own processes: the real definitions on a workspace whose engine is a fake."""

from fakes import FakedWorkspace

from pipelines.definitions import build_defs

defs = build_defs(FakedWorkspace.from_environment(lambda _: None))
