"""Where the engine environment is, and what fleets of the end-to-end tests look like."""

import json
from pathlib import Path

import pytest

PYTHON = Path(".venv-engine/bin/python").absolute()
needs_engine = pytest.mark.skipif(not PYTHON.exists(), reason="no engine environment (.venv-engine): run `make`")


def fleet(name, model, **engine):
    return {
        "name": name,
        "model": {"name": "tiny", "directory": str(model)},
        "engine": {"vllm": "0.32.0", "lmcache": "0.5.6", "dtype": "float32", **engine},
        "prompts": {"directory": "prompts"},
        "warm": {"visible_deadline_s": 20.0},
        "proof": {"samples": 2, "ttft_speedup": 0.01},
    }


def write_config(directory, fleets):
    path = directory / "warmfront.yaml"
    local = {"engine_python": str(PYTHON), "l1_gb": 0.5, "kv_space_gb": 1}
    path.write_text(json.dumps({"state": "state", "fleets": fleets, "local": local}))
    return path


def sentences(word, count):
    return "".join(
        f"Rule {n}: the {word} of item {n} is handled with care, as the handbook says.\n" for n in range(count)
    )
