"""What a tick of the template sensor costs."""

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.fleets import write_fleet, write_template, write_templates
from benchmarks.registry import benchmark

TEMPLATES = 10_000

# A new process: fleets are fixed when assets are imported. Prints the seconds of a tick, and its cursor.
TICK = """
import json, sys, time
import dagster as dg
from pipelines.definitions import build_defs
from resources.workspace import Workspace

workspace = Workspace.from_environment(on_event=lambda _: None)
cursor = sys.stdin.read() or None
repository = build_defs(workspace).get_repository_def()
sensor = repository.get_sensor_def("prompt_templates_changed")
with dg.DagsterInstance.ephemeral() as instance, dg.build_sensor_context(
    instance, cursor, sensor_name=sensor.name, repository_def=repository, resources={"workspace": workspace}
) as context:
    started = time.perf_counter()
    data = sensor.evaluate_tick(context)
    seconds = time.perf_counter() - started
print(json.dumps({"seconds": seconds, "cursor": data.cursor, "requests": len(data.run_requests)}))
"""


@benchmark("sensor_tick_s", "sensor_tick_after_one_edit_s", "sensor_cursor_bytes")
def sensor_tick(directory: Path) -> dict[str, float]:
    """A first tick reads every template; then one with nothing changed, and one with one template changed.

    Each in a new process, as if the code server had just been restarted.
    """
    config = write_fleet(directory)
    files = write_templates(directory / "prompts", TEMPLATES)
    first = _tick(config, "")
    unchanged = _tick(config, first["cursor"])
    write_template(files[TEMPLATES // 2], "Another text.")
    edited = _tick(config, unchanged["cursor"])
    asked = [tick["requests"] for tick in (first, unchanged, edited)]
    if asked != [1, 0, 1]:
        raise AssertionError(f"the three ticks asked for {asked} runs, not for 1, 0 and 1")
    return {
        "sensor_tick_s": unchanged["seconds"],
        "sensor_tick_after_one_edit_s": edited["seconds"],
        "sensor_cursor_bytes": len(edited["cursor"]),
    }


def _tick(config: Path, cursor: str) -> dict[str, float | str]:
    env = {**os.environ, "WARMFRONT_CONFIG": str(config)}
    done = subprocess.run([sys.executable, "-c", TICK], input=cursor, capture_output=True, text=True, env=env)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])
