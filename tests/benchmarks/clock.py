"""Wall time of pieces of work that take turns, so that a noisy neighbour disturbs all of them alike."""

import time
from collections.abc import Callable
from typing import Any


def best_of(turns: int, *works: Callable[[], Any]) -> list[float]:
    """Seconds of each work's fastest turn: whatever else runs on the machine can only slow a turn down."""
    seconds: list[list[float]] = [[] for _ in works]
    for _ in range(turns):
        for taken, work in zip(seconds, works, strict=True):
            started = time.perf_counter()
            work()
            taken.append(time.perf_counter() - started)
    return [min(taken) for taken in seconds]
