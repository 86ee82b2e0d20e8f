"""Make an environment from a lock, without resolving; or renew the lock. Needs Python 3.11 and nothing else.

    python3 deploy/make_env.py DIRECTORY LOCK [PROJECT]
    python3 deploy/make_env.py --renew LOCK REQUIREMENT...

A lock is installed with --no-deps: letting pip resolve the same set takes many minutes of backtracking.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's own index, asked only for torch and only where pip's configured index does not have the build."""
NOT_FOR_CPU = re.compile(r"^(nvidia-|cuda-|cupy|triton|torchvision|torchaudio|torchcodec|nixl|pip$|warmfront$)")
"""Dead weight without a GPU; torchvision and torchaudio break transformers beside a CPU torch."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Make an environment from a lock, or renew a lock.")
    parser.add_argument("--renew", action="store_true")
    parser.add_argument("paths", nargs="+")
    args, requirements = parser.parse_known_args()
    if args.renew:
        renew(Path(args.paths[0]), [*requirements, *args.paths[1:]])
    elif requirements or len(args.paths) not in (2, 3):
        parser.error("give DIRECTORY, LOCK and, where there is one, the PROJECT to install editable")
    else:
        make(*(Path(path) for path in args.paths))


def make(directory: Path, lock: Path, project: Path | None = None) -> None:
    if sys.version_info[:2] < (3, 11):
        sys.exit(f"warmfront needs Python 3.11 or newer, and this is {sys.version.split()[0]}. Set PYTHON=python3.11.")
    python = directory / "bin" / "python"
    if not python.exists() or subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(directory)], check=True)
    pins = [line for line in lock.read_text().splitlines() if line.strip() and not line.startswith("#")]
    torch = [pin for pin in pins if pin.startswith("torch==")]
    if torch and not pip(directory, *torch, may_fail=True):
        print(f"pip's configured index has no {torch[0]}: asking PyTorch's CPU index", flush=True)
        pip(directory, *torch, "--index-url", TORCH_INDEX)
    rest = [pin for pin in pins if pin not in torch]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(rest) + "\n")
        file.flush()
        pip(directory, "-r", file.name)
    if project:
        pip(directory, "--no-build-isolation", "-e", str(project))


def pip(directory: Path, *arguments: str, may_fail: bool = False) -> bool:
    """Install without dependencies; a failure ends the program and says which package it was."""
    command = [str(directory / "bin" / "python"), "-m", "pip", "install", "-q", "--no-deps", *arguments]
    env = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode == 0 or may_fail:
        return done.returncode == 0
    errors = [line for line in done.stderr.splitlines() if "ERROR" in line or "error:" in line] or [done.stderr[-2000:]]
    named = (re.search(r"(?:for|of|satisfies the requirement) (\S+)", line) for line in errors)
    package = next((match[1] for match in named if match), "a package")
    sys.exit(
        "\n".join(errors)
        + f"\ncould not install {package} into {directory}. Check that pip's index is reachable and serves this"
        " version for this Python and platform, then run make again: what is installed stays."
    )


def renew(lock: Path, requirements: list[str]) -> None:
    """Resolve in a scratch environment and freeze what came of it."""
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([sys.executable, "-m", "venv", scratch], check=True)
        python = str(Path(scratch) / "bin" / "python")
        extra = ["--extra-index-url", TORCH_INDEX] if "engine" in str(lock) else []
        subprocess.run([python, "-m", "pip", "install", *extra, *requirements], check=True)
        frozen = subprocess.run(
            [python, "-m", "pip", "freeze", "--exclude-editable"], check=True, capture_output=True, text=True
        )
    pins = [line for line in frozen.stdout.splitlines() if not NOT_FOR_CPU.match(line.partition("==")[0].lower())]
    lock.write_text("\n".join(pins) + "\n")
    print(f"{lock}: {len(pins)} packages")


if __name__ == "__main__":
    main()
