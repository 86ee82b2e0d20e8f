"""A shared file system as L2, on real file systems."""

import errno
import os
import time

import numpy as np
import pytest
from small_disks import mounted

from resources.file_store import FileStore
from warmers.errors import ConfigError, StoreUnavailable


@pytest.fixture
def store(tmp_path):
    (tmp_path / "kv").mkdir()
    store = FileStore(tmp_path / "kv", ttl_s=100)
    store.require_writable("ns/")
    return store


def test_many_batches(store):
    keys = [f"ns/m@0x01000100@0@{n:064x}.data" for n in range(2_500)]
    for n, key in enumerate(keys):
        if n % 3:
            (store.directory / key).write_bytes(b"x" * (n % 3))
    assert store.sizes(keys).tolist() == [n % 3 or -1 for n in range(2_500)]
    store.delete(keys)
    assert (store.sizes(keys) == -1).all()


def test_a_file_that_nobody_uses_is_overdue_and_one_that_is_read_is_not(store):
    keys = [f"ns/m@0x01000100@0@{name}.data" for name in ("old", "read", "touched")]
    now = time.time()
    for key in keys:
        (store.directory / key).write_bytes(b"x")
        os.utime(store.directory / key, (now - 300, now - 300))
    os.utime(store.directory / keys[1], (now - 10, now - 300))
    store.extend(keys[2:], np.array([100]))
    overdue, read, touched = store.lives(keys).tolist()
    assert overdue == 0
    assert 85 < read < 95
    assert 95 < touched <= 100
    assert FileStore(store.directory).lives(keys[:1]).tolist() == [np.inf]


def test_what_an_interrupted_write_left_is_no_chunk_and_goes_with_it(store):
    key = "ns/m@0x01000100@0@ab.data"
    (store.directory / key).with_suffix(".tmp").write_bytes(b"half")
    assert store.sizes([key]).tolist() == [-1]
    assert list(store.names("ns/")) == []
    store.delete([key])
    assert list((store.directory / "ns").iterdir()) == []


def test_a_namespace_that_nobody_has_written_to_is_empty_and_a_mount_that_is_gone_is_not(tmp_path):
    assert FileStore(tmp_path).sizes(["ns/a"]).tolist() == [-1]
    with pytest.raises(StoreUnavailable, match=r"asking for sizes of 1 files.*Check that it is mounted"):
        FileStore(tmp_path / "gone").sizes(["ns/a"])


def test_a_stale_mount_says_so(store, monkeypatch):
    def stale(*_, **__):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr("os.stat", stale)
        with pytest.raises(StoreUnavailable) as error:
            store.sizes(["ns/a"])
    assert "Stale file handle. Check that it is mounted" in str(error.value)


def test_a_mount_that_takes_no_files_is_refused(tmp_path):
    with mounted(tmp_path / "mount", "ro,size=4k") as directory:
        store = FileStore(directory)
        with pytest.raises(ConfigError, match=r"Read-only file system.*Mountpoint for S3 has none"):
            store.require_writable("chat-0123/")


def test_a_mount_without_rename_is_refused_and_left_clean(tmp_path, monkeypatch):
    def no_rename(*_):
        raise OSError(38, "Function not implemented")  # as Mountpoint for S3 answers

    monkeypatch.setattr("pathlib.Path.replace", no_rename)
    with pytest.raises(ConfigError, match="cannot be written and renamed there"):
        FileStore(tmp_path).require_writable("ns/")
    assert list((tmp_path / "ns").iterdir()) == []
