"""What it costs to compare a million chunks with L2."""

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
from warmers.ledger import rows_of
from warmers.prefixes import Prefix, PrefixSet

CHUNK_TOKENS, PREFIX_CHUNKS, CHUNKS = 16, 250, 1_000_000

# The asset itself, in a process of its own, as in planning.py.
INVENTORY = f"""
import json, os, re
from pathlib import Path
import dagster as dg
from assets.lifecycle import l2_inventory
from resources.workspace import Workspace

workspace = Workspace(Path(os.environ["WARMFRONT_CONFIG"]), on_event=lambda _: None)
done = dg.materialize([l2_inventory], partition_key="{FLEET}", resources={{"workspace": workspace}})
metadata = done.asset_materializations_for_node("l2_inventory")[0].metadata
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
seen = {{name: metadata[name].value for name in ("chunks", "missing", "present")}}
print(json.dumps({{**seen, "peak_mb": peak / 1024}}))
"""


@benchmark("inventory_1m_s", "inventory_1m_rss_mb")
def inventory(directory: Path) -> dict[str, float]:
    """`l2_inventory` of 4,000 prefixes of 250 chunks, all warmed, one in ten evicted: process start to end."""
    with running_valkey(directory) as store:
        path = write_fleet(directory, store.access.url, CHUNK_TOKENS)
        workspace = Workspace(path, on_event=lambda _: None)
        fleet = workspace.fleet(FLEET)
        prefixes = PrefixSet(tuple(_prefixes()))
        workspace.state.save_prefixes(FLEET, prefixes, {})
        plan = workspace.plan(fleet, prefixes)
        rows = rows_of(plan, range(len(plan.tree.hashes)), warmed_at=time.time())
        workspace.state.journal(fleet.namespace).record(rows)
        gone = len(plan.tree.names[::10])
        fill(store, [name for n, name in enumerate(plan.tree.names) if n % 10], bytes(fleet.chunk_bytes))
        del plan, rows, prefixes
        started = time.perf_counter()
        seen = _take(path)
        seconds = time.perf_counter() - started
    if (seen["chunks"], seen["missing"], seen["present"]) != (CHUNKS, gone, CHUNKS - gone):
        raise AssertionError(f"of {CHUNKS} chunks {gone} are gone, and it saw {seen}")
    return {"inventory_1m_s": seconds, "inventory_1m_rss_mb": seen["peak_mb"]}


def _prefixes() -> Iterator[Prefix]:
    random, tokens = np.random.default_rng(1), CHUNK_TOKENS * PREFIX_CHUNKS
    for number in range(CHUNKS // PREFIX_CHUNKS):
        ids = random.integers(0, 150_000, tokens + 1, dtype=np.uint32)
        yield Prefix(f"t{number:05d}", None, f"{number:064x}", ids, tokens, CHUNK_TOKENS)


def _take(config: Path) -> dict[str, float]:
    env = {**os.environ, "WARMFRONT_CONFIG": str(config)}
    done = subprocess.run([sys.executable, "-c", INVENTORY], capture_output=True, text=True, env=env)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])
