"""A shared file system as L2, on real file systems."""

import subprocess
from shutil import which

import pytest

from resources.file_store import FileStore
from warmers.errors import ConfigError, StoreUnavailable


@pytest.fixture
def store(tmp_path):
    store = FileStore(tmp_path / "kv" / "chat-0123")
    store.require_rename()
    return store


def test_sizes_and_deletion_over_many_batches(store):
    keys = [f"m@0x01000100@0@{n:064x}.data" for n in range(2_500)]
    for n, key in enumerate(keys):
        if n % 3:
            (store.directory / key).write_bytes(b"x" * (n % 3))
    assert store.sizes(keys).tolist() == [n % 3 or -1 for n in range(2_500)]
    assert store.delete(keys) == 1_666
    assert (store.sizes(keys) == -1).all()
    assert store.sizes([]).tolist() == []


def test_what_an_interrupted_write_left_is_no_chunk_and_goes_with_it(store):
    key = "m@0x01000100@0@ab.data"
    (store.directory / key).with_suffix(".tmp").write_bytes(b"half")
    assert store.sizes([key]).tolist() == [-1]
    assert store.delete([key]) == 0
    assert list(store.directory.iterdir()) == []


def test_a_namespace_that_nobody_has_written_to_is_empty_and_a_mount_that_is_gone_is_not(tmp_path):
    assert FileStore(tmp_path / "new").sizes(["a"]).tolist() == [-1]
    with pytest.raises(StoreUnavailable, match=r"asking for sizes of 1 files.*Check that it is mounted"):
        FileStore(tmp_path / "gone" / "new").sizes(["a"])


def test_a_mount_that_takes_no_files_is_refused(tmp_path):
    directory = tmp_path / "mount"
    directory.mkdir()
    argv = [which("mount"), "-t", "tmpfs", "-o", "ro,size=4k", "tmpfs", directory]
    if subprocess.run(argv, capture_output=True).returncode:
        pytest.skip("mounting a file system needs CAP_SYS_ADMIN")
    try:
        with pytest.raises(ConfigError, match=r"Read-only file system.*Mountpoint for S3 has none"):
            FileStore(directory / "chat-0123").require_rename()
    finally:
        subprocess.run([which("umount"), directory], check=True)


def test_a_mount_without_rename_is_refused_and_left_clean(tmp_path, monkeypatch):
    def no_rename(*_):
        raise OSError(38, "Function not implemented")  # as Mountpoint for S3 answers

    monkeypatch.setattr("pathlib.Path.replace", no_rename)
    with pytest.raises(ConfigError, match="cannot be written and renamed there"):
        FileStore(tmp_path / "ns").require_rename()
    assert list((tmp_path / "ns").iterdir()) == []
