"""How fast keys are computed, against LMCache's own code."""

import json
import os
import subprocess
from pathlib import Path

from benchmarks.registry import benchmark
from engine_environment import PYTHON

# In the engine environment, both in one process and taking turns. Only hashing is timed: arrays and lists are there.
BOTH = """
import json, logging, sys
logging.disable(logging.CRITICAL)
import numpy as np
from lmcache.v1.multiprocess.token_hasher import TokenHasher
from benchmarks.clock import best_of
from warmers.keys import chunk_hashes

prompts = list(np.random.default_rng(0).integers(0, 150_000, (500, 4_096), dtype=np.uint32))
lists = [ids.tolist() for ids in prompts]
hasher = TokenHasher(256, "blake3")
for ids in prompts[:10]:
    assert chunk_hashes(ids, 256).tobytes() == b"".join(hasher.compute_chunk_hashes(ids)), "the hashes differ"
ours, theirs, theirs_on_lists = best_of(
    5,
    lambda: [chunk_hashes(ids, 256) for ids in prompts],
    lambda: [hasher.compute_chunk_hashes(ids) for ids in prompts],
    lambda: [hasher.compute_chunk_hashes(ids) for ids in lists],
)
print("RESULT" + json.dumps({
    "key_hash_speedup": theirs / ours,
    "key_hash_speedup_lists": theirs_on_lists / ours,
    "key_hash_mtokens_s": 500 * 4_096 / ours / 1e6,
}))
"""


@benchmark("key_hash_speedup", "key_hash_speedup_lists", "key_hash_mtokens_s")
def key_hash(directory: Path) -> dict[str, float]:
    """The chunk hashes of 500 prompts of 4,096 tokens."""
    if not PYTHON.exists():
        raise RuntimeError(f"there is no engine environment {PYTHON}: run `make`")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), str(Path("tests").absolute())])}
    done = subprocess.run([PYTHON, "-c", BOTH], capture_output=True, text=True, env=env)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.partition("RESULT")[2])
