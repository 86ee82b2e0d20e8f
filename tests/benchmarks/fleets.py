"""A fleet for benchmarks without an engine: a complete warmfront.yaml, templates, a real Valkey."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from resources.local_stack import LocalStack
from resources.valkey_store import ValkeyStore

FLEET = "chat"


def write_fleet(directory: Path, valkey: str = "redis://127.0.0.1:1", chunk_tokens: int = 256) -> Path:
    """One fleet of a model so small that a chunk of 256 tokens is 2 KB; its templates are in `prompts`."""
    model, prompts = directory / "model", directory / "prompts"
    model.mkdir()
    prompts.mkdir()
    shape = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 1}
    (model / "config.json").write_text(json.dumps(shape))
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "tokenizer.json").write_text("{}")
    write_template(prompts / "first.yaml", "You help customers.")
    fleet = {
        "name": FLEET,
        "model": {"name": "m", "directory": "model"},
        "engine": {
            "vllm": "0.32.0",
            "lmcache": "0.5.6",
            "dtype": "float32",
            "block_tokens": 16,
            "chunk_tokens": chunk_tokens,
        },
        "l2": {"url": valkey},
        "prompts": {"directory": "prompts"},
    }
    path = directory / "warmfront.yaml"
    path.write_text(json.dumps({"state": "state", "fleets": [fleet]}))
    return path


@contextmanager
def running_valkey(directory: Path) -> Iterator[ValkeyStore]:
    """The embedded Valkey, empty, for as long as the block lasts."""
    stack = LocalStack(directory / "stack", on_event=lambda _: None)
    try:
        with stack.processes.locked():
            url = stack.ensure()
        yield ValkeyStore.at(url)
    finally:
        stack.down()


def fill(store: ValkeyStore, names: tuple[str, ...] | list[str], value: bytes) -> None:
    """Store one value under every name."""
    for start in range(0, len(names), 10_000):
        pipeline = store.client.pipeline(transaction=False)
        for name in names[start : start + 10_000]:
            pipeline.set(name, value)
        pipeline.execute()


def write_templates(directory: Path, count: int) -> list[Path]:
    """Template files of about 2 KB; each starts with a text of its own, and was written an hour ago."""
    rules = "".join(f"    Rule {n}: the parcel of item {n} is handled with care.\n" for n in range(40))
    return [
        write_template(directory / f"t{number:05d}.yaml", f"Template {number}.\n{rules}") for number in range(count)
    ]


def write_template(path: Path, text: str) -> Path:
    """One template, as written an hour ago: a sensor leaves files alone that may be half written."""
    path.write_text(
        f"messages:\n- role: system\n  content: |\n    {text}\n- {{role: user, content: '{{{{ question }}}}'}}\n"
    )
    hour_ago = time.time() - 3600
    os.utime(path, (hour_ago, hour_ago))
    return path
