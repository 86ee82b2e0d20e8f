"""One host for real engines: tests that name the same fleet share one, and are run together.

An engine takes most of a minute to start, and two cores carry one. Tests keep apart by salt or by template,
never by flushing; `cold` between samples is L0 and L1 dropped, not a restart.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from engine_environment import PYTHON, fleet, sentences, write_config
from valkey_servers import WITH_TLS

from resources.local_stack import LocalStack
from resources.workspace import Workspace

FLEETS = ("chat", "shared", "bucket", "secure", "plugin", "tp2", "bare")
"""Order of starts: plain, on a shared file system, on S3, on Valkey with TLS by LMCache's own adapter and by ours,
tensor parallel 2, and an engine without its KV connector."""


def pytest_collection_modifyitems(items):
    """Group by fleet, and leave whole demo runs, which bring their own engines, to the end."""

    def place(item):
        marker = item.get_closest_marker("fleet")
        return FLEETS.index(marker.args[0]) if marker else len(FLEETS)

    here = [item for item in items if "/e2e/" in str(item.path)]
    others = [item for item in items if "/e2e/" not in str(item.path)]
    items[:] = others + sorted(here, key=place)


@pytest.fixture(scope="session")
def tiny_model():
    """A generated Llama of 4 layers, kept between runs."""
    out = Path(".warmfront/models/tiny").absolute()
    subprocess.run([PYTHON, "deploy/local/make_model.py", out, "--size", "tiny"], check=True, capture_output=True)
    return out


@pytest.fixture(scope="session")
def own_folder(tmp_path_factory, tiny_model, host):
    """Somebody's own folder of templates and a model whose weights are staged: the configuration that names them."""
    host.stack.down()  # the demo brings an engine of its own, and two cores carry one
    directory = tmp_path_factory.mktemp("own")
    prompts = directory / "prompts"
    prompts.mkdir()
    (prompts / "steady.md").write_text(sentences("ledger", 60))
    (prompts / "edited.md").write_text(sentences("voucher", 60))
    (prompts / "short.txt").write_text("Hello.")
    (prompts / "broken.yaml").write_text("messages: [")
    shutil.copytree(tiny_model, directory / "model")
    streaming = fleet("chat", tiny_model) | {"model": {"name": "tiny", "source": "model"}}
    return write_config(directory, [streaming])


@pytest.fixture(scope="session")
def demo():
    """Run the demo on a configuration: how it ended, and what it wrote."""

    def demo(config):
        env = {**os.environ, "WARMFRONT_CONFIG": str(config)}
        argv = [sys.executable, "deploy/local/demo.py"]
        done = subprocess.run(argv, capture_output=True, text=True, env=env)
        print(done.stdout, done.stderr)
        return done, json.loads((config.parent / "state" / "demo.json").read_text())

    return demo


@pytest.fixture(scope="session")
def host(tmp_path_factory, tiny_model):
    """A workspace with the embedded stack for all fleets; ended after the last test."""
    directory = tmp_path_factory.mktemp("host")
    prompts = directory / "prompts"
    prompts.mkdir()
    shared = sentences("parcel", 40)
    (prompts / "one.md").write_text(shared + sentences("invoice", 30))
    (prompts / "two.md").write_text(shared + sentences("refund", 20))
    (prompts / "salted.yaml").write_text(
        json.dumps({"salt": "tenant-7", "messages": [{"role": "system", "content": sentences("lens", 30)}]})
    )
    tool = {
        "type": "function",
        "function": {"name": "look_up", "description": sentences("shelf", 20), "parameters": {"type": "object"}},
    }
    (prompts / "tools.json").write_text(
        json.dumps({"messages": [{"role": "system", "content": "Use tools."}], "tools": [tool]})
    )
    (directory / "kv").mkdir()
    tiers = {
        "shared": {"type": "fs", "directory": "kv"},
        "bucket": {"type": "s3"},
        **{
            name: demo_l2(directory, l2)
            for name, l2 in {"secure": "valkey-tls", "plugin": "plugin"}.items()
            if WITH_TLS
        },
    }
    two_ranks = fleet("tp2", tiny_model, tensor_parallel=2)
    fleets = [fleet(name, tiny_model) | {"l2": l2} for name, l2 in tiers.items()]
    fleets += [fleet("chat", tiny_model), two_ranks, fleet("bare", tiny_model)]
    workspace = Workspace(write_config(directory, fleets), on_event=print)
    yield workspace
    workspace.stack.down()
    for name in ("secure", "plugin"):
        LocalStack(directory / name / "stack", on_event=print).down()


def demo_l2(directory, l2):
    """The `l2` of `make demo L2=...`, and the server that goes with it."""
    out = directory / {"valkey-tls": "secure"}.get(l2, l2)
    argv = [sys.executable, "deploy/local/configure.py", out.with_suffix(".yaml"), "--l2", l2]
    subprocess.run(argv, check=True)
    return yaml.safe_load(out.with_suffix(".yaml").read_text())["fleets"][0]["l2"]
