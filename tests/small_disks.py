"""File systems of a few kilobytes or megabytes, for tests of what fills up or takes nothing."""

import subprocess
from contextlib import contextmanager
from shutil import which

import pytest


@contextmanager
def mounted(directory, options):
    """A tmpfs with `options` (`size=4k`) at a directory, made where there is none; skips where nobody may mount."""
    directory.mkdir(parents=True, exist_ok=True)
    argv = [which("mount"), "-t", "tmpfs", "-o", options, "tmpfs", directory]
    if subprocess.run(argv, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs CAP_SYS_ADMIN")
    try:
        yield directory
    finally:
        subprocess.run([which("umount"), directory], check=True)
