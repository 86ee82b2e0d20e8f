"""What Dagster pays to load the code location."""

import subprocess
import sys
from pathlib import Path
from statistics import median

from benchmarks.registry import benchmark

LOAD = """
import time
import dagster
before = time.process_time()
import pipelines.definitions
print(time.process_time() - before)
"""
TIMES = 7


@benchmark("load_cpu_s")
def load(directory: Path) -> dict[str, float]:
    """Median of new processes."""
    seconds = [
        float(subprocess.run([sys.executable, "-c", LOAD], check=True, capture_output=True, text=True).stdout)
        for _ in range(TIMES)
    ]
    return {"load_cpu_s": median(seconds)}
