"""What a cold start costs: the sample model from a local directory, and streamed from its stage, in one run."""

import json
import time
from pathlib import Path

from benchmarks.engine import embedded_settings
from benchmarks.registry import benchmark

from resources.proc import session_of
from resources.settings import Settings
from resources.workspace import Workspace
from warmers.stage import stage


@benchmark(
    "cold_start_local_s",
    "cold_start_streamed_s",
    "cold_start_streamed_over_local",
    "cold_start_local_rss_mb",
    "cold_start_streamed_rss_mb",
)
def cold_start(directory: Path) -> dict[str, float]:
    """Engine and daemon, from their start until both are healthy."""
    settings = embedded_settings(directory)
    local_s, local_mb = _start(directory, _from_directory(settings))
    streamed_s, streamed_mb = _start(directory, settings)
    return {
        "cold_start_local_s": local_s,
        "cold_start_streamed_s": streamed_s,
        "cold_start_streamed_over_local": streamed_s / local_s,
        "cold_start_local_rss_mb": local_mb,
        "cold_start_streamed_rss_mb": streamed_mb,
    }


def _from_directory(settings: Settings) -> Settings:
    (fleet,) = settings.fleets
    model = fleet.model.model_copy(update={"directory": Path(fleet.model.source or ""), "source": None})
    return settings.model_copy(update={"fleets": (fleet.model_copy(update={"model": model}),)})


def _start(directory: Path, settings: Settings) -> tuple[float, float]:
    """Seconds, and the largest resident memory that any process of the engine had, in MB."""
    path = directory / "warmfront.yaml"
    path.write_text(json.dumps(settings.model_dump(mode="json")))
    workspace = Workspace(path, on_event=lambda _: None)
    try:
        model = workspace.fleet_settings().model
        if model.source is not None:
            source, stages = workspace.source(workspace.fleet_settings().name), workspace.open_stages()
            with workspace.stage_lease(model.name) as fence:
                stage(source, model.name, stages, fence, workspace.clock.now)
        fleet = workspace.fleet()
        with workspace.stack.processes.locked():
            workspace.stack.ensure()
        began = time.perf_counter()
        with workspace.replicas(fleet.name).warmer(fleet):
            seconds = time.perf_counter() - began
            engine = workspace.stack.processes.recorded("engine")
            peaks = [_peak_kb(pid) for pid in session_of(engine.pid)] if engine else []
    finally:
        workspace.stack.down()
    return seconds, max(peaks) / 1000


def _peak_kb(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)
