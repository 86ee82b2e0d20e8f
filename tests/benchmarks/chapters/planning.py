"""From stored prefixes to a written plan, at the size that the design promises."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from benchmarks.fleets import FLEET, fill, running_valkey, write_fleet
from benchmarks.registry import benchmark

from resources.workspace import Workspace
from warmers.keys import KeyLayout
from warmers.plan import grow_tree
from warmers.prefixes import Prefix, PrefixSet

PREFIXES, TOKENS, SHARED_TOKENS, FAMILIES = 10_000, 4_000, 2_048, 50

# The asset itself, in a process of its own. VmHWM is the peak of this process image; ru_maxrss has the parent's in it.
PLAN = f"""
import json, os, re
from pathlib import Path
import dagster as dg
from assets.cache import warm_plan
from resources.workspace import Workspace

workspace = Workspace(Path(os.environ["WARMFRONT_CONFIG"]), on_event=lambda _: None)
done = dg.materialize([warm_plan], partition_key="{FLEET}", resources={{"workspace": workspace}})
metadata = done.asset_materializations_for_node("warm_plan")[0].metadata
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
print(json.dumps({{"missing": metadata["missing_chunks"].value, "peak_mb": peak / 1024}}))
"""


@benchmark("plan_10k_s", "plan_10k_rss_mb")
def plan_10k(directory: Path) -> dict[str, float]:
    """The worst of four: prefixes with nothing in common or in families, on an empty and on a half-filled Valkey.

    Every second chunk is there in the latter, which makes as many requests as a plan can have.
    """
    seconds, peaks = [], []
    with running_valkey(directory) as store:
        path = write_fleet(directory, store.access.url)
        workspace = Workspace(path, on_event=lambda _: None)
        fleet = workspace.fleet(FLEET)
        for families in (0, FAMILIES):
            prefixes = PrefixSet(tuple(_prefixes(families)))
            workspace.state.save_prefixes(FLEET, prefixes, {})
            names = grow_tree(prefixes.prefixes, KeyLayout.of(fleet)).names
            del prefixes
            for there in (names[:0], names[::2]):
                store.client.flushall()
                fill(store, there, bytes(fleet.chunk_bytes))
                started = time.perf_counter()
                seen = _plan(path)
                seconds.append(time.perf_counter() - started)
                peaks.append(seen["peak_mb"])
                if seen["missing"] != len(names) - len(there):
                    raise AssertionError(f"{seen['missing']} of {len(names)} chunks planned, {len(there)} are there")
    return {"plan_10k_s": max(seconds), "plan_10k_rss_mb": max(peaks)}


def _prefixes(families: int) -> Iterator[Prefix]:
    random = np.random.default_rng(1)
    starts = random.integers(0, 150_000, (families, SHARED_TOKENS), dtype=np.uint32)
    for number in range(PREFIXES):
        ids = random.integers(0, 150_000, TOKENS + 16, dtype=np.uint32)
        if families:
            ids[:SHARED_TOKENS] = starts[number % families]
        yield Prefix(f"t{number:05d}", None, f"{number:064x}", ids, TOKENS, 256, weight=1.0 + number % 7)


def _plan(config: Path) -> dict[str, float]:
    env = {**os.environ, "WARMFRONT_CONFIG": str(config)}
    done = subprocess.run([sys.executable, "-c", PLAN], capture_output=True, text=True, env=env)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])
