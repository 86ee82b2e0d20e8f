"""LMCache's L2 adapters in a process of the engine's environment: the other end of `plugin_driver.py`."""

import json
import subprocess
from contextlib import contextmanager
from pathlib import Path

from engine_environment import PYTHON

from resources.tiers import PLUGIN

DRIVER = Path(__file__).with_name("plugin_driver.py")


class Adapter:
    """One that runs."""

    def __init__(self, process):
        self.process = process

    def __call__(self, do, **what):
        self.process.stdin.write(json.dumps({"do": do, **what}) + "\n")
        self.process.stdin.flush()
        return self.wait()

    def wait(self):
        """The next line of JSON; LMCache's log goes there too. Raises EOFError with that, when it has ended."""
        lines = []
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
            lines.append(line)
        raise EOFError("".join(lines))


@contextmanager
def adapter(config, **env):
    """Started with `--l2-adapter config`."""
    argv = [str(PYTHON), str(DRIVER), json.dumps(config)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(argv, **pipes, env={"PATH": "/usr/bin:/bin", **env}) as process:
        try:
            started = Adapter(process)
            started.wait()
            yield started
            started("close")
        finally:
            process.kill()


def plugin(port, **params):
    """Configuration of warmfront's adapter."""
    return {**PLUGIN, "adapter_params": {"host": "127.0.0.1", "port": port, "key_prefix": "ns", **params}}


def builtin(port, **params):
    """Configuration of LMCache's own, for the same keys."""
    return {"type": "valkey", "startup_nodes": f"127.0.0.1:{port}", "key_prefix": "ns", **params}
