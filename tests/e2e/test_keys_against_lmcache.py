"""Our keys against LMCache's own code, in the engine environment."""

import json
import subprocess

import numpy as np
from engine_environment import PYTHON, needs_engine

from warmers.keys import KeyLayout, chunk_keys

pytestmark = needs_engine

THEIRS = """
import json, sys, logging
logging.disable(logging.CRITICAL)
from lmcache.v1.multiprocess.cache_control.key_resolver import resolve_object_keys
from lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter import _object_key_to_string as valkey
from lmcache.v1.distributed.l2_adapters.s3_l2_adapter import _object_key_to_string as s3
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import _object_key_to_filename as fs
from lmcache.v1.multiprocess.token_hasher import TokenHasher
cases = json.load(sys.stdin)
hashers, out = {}, []
for case in cases:
    hasher = hashers.setdefault(case["chunk_tokens"], TokenHasher(case["chunk_tokens"], "blake3"))
    objects, _ = resolve_object_keys(hasher, case["model"], case["world_size"], case["ids"], case["salt"])
    out.append([{"valkey": valkey, "s3": s3, "fs": fs}[case["store"]](key) for key in objects])
print("RESULT" + json.dumps(out))
"""


def test_keys_are_those_of_lmcache():
    random = np.random.default_rng(0)
    cases = [
        {
            "ids": random.integers(0, 150_000, int(random.integers(1, 1500))).tolist(),
            "chunk_tokens": chunk,
            "world_size": world,
            "model": model,
            "salt": salt,
            "store": store,
        }
        for chunk in (128, 256)
        for world in (1, 2, 4)
        for model, salt in (("/models/a-b", ""), ("org/name", "tenant"))
        for store in ("valkey", "s3", "fs")
    ]
    done = subprocess.run([PYTHON, "-c", THEIRS], input=json.dumps(cases), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads(done.stdout.partition("RESULT")[2])
    for case, keys in zip(cases, theirs, strict=True):
        layout = KeyLayout(case["model"], case["chunk_tokens"], case["world_size"], case["store"])
        assert list(chunk_keys(np.array(case["ids"], np.uint32), layout, case["salt"])) == keys
