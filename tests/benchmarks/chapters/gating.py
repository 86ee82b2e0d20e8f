"""What a user waits for on a replica that was behind its gate."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import httpx
import numpy as np
from benchmarks.engine import WarmEngine, warm_engine
from benchmarks.registry import benchmark

from resources.hot_sets import encode
from resources.processes import free_port
from warmers.hot_set import HotSet

ROUNDS = 5
QUESTION_TOKENS = 32
OPEN_S = 120.0


@benchmark("gate_ttft_over_l0", "gate_seconds_to_warm", on=warm_engine)
def first_request(engine: WarmEngine) -> dict[str, float]:
    """TTFT of each prefix's first request after the gate opened, over that of another with a question of its own.

    The second finds the prefix in L0, and both compute their question of 32 tokens: what the template's tail behind the
    last whole chunk would add is computed by every request, gate or not.
    Medians over all prefixes and rounds; each round begins with L0 and L1 dropped, as a new replica has them, and with
    a gate of its own. The hot set is all of the sample, which L0 has room for.
    """
    hot = HotSet.of(engine.fleet, engine.prefixes.prefixes)
    first, again, seconds = [], [], []
    for _ in range(ROUNDS):
        engine.replica.forget()
        with _opened(engine, hot) as warm_s:
            seconds.append(warm_s)
        for prefix in engine.prefixes.prefixes:
            for number, into in enumerate((first, again)):
                question = np.arange(QUESTION_TOKENS, dtype=np.uint32) + 1_000 + QUESTION_TOKENS * number
                ids = np.concatenate([prefix.ids[: prefix.full_tokens], question])
                into.append(engine.replica.generate(ids, max_tokens=1, salt=prefix.salt or None).ttft_s)
    return {"gate_ttft_over_l0": median(first) / median(again), "gate_seconds_to_warm": median(seconds)}


@contextmanager
def _opened(engine: WarmEngine, hot: HotSet) -> Iterator[float]:
    """A gate that is open, as a program of its own, and how long it took to be warm."""
    with tempfile.TemporaryDirectory() as directory:
        file, port = Path(directory) / "hot_set.json", free_port()
        file.write_bytes(encode(hot))
        argv = [sys.executable, "-m", "pipelines.gate", "--hot-set", str(file), "--model", hot.served_name]
        argv += ["--engine", engine.replica.engine.url, "--daemon", engine.replica.daemon.url]
        gate = subprocess.Popen([*argv, "--host", "127.0.0.1", "--port", str(port)], stderr=subprocess.DEVNULL)
        try:
            yield _wait(f"http://127.0.0.1:{port}/ready")
        finally:
            gate.terminate()
            gate.wait(10)


def _wait(url: str) -> float:
    deadline = time.monotonic() + OPEN_S
    while time.monotonic() < deadline:
        try:
            answer = httpx.get(url, trust_env=False)
        except httpx.TransportError:
            time.sleep(0.05)
            continue
        if answer.status_code == 200:
            return float(answer.json()["seconds_to_warm"])
        time.sleep(0.05)
    raise RuntimeError(f"the gate is not open after {OPEN_S:g} s: {answer.text}")
