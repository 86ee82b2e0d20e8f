import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmers.errors import ConfigError
from warmers.keys import ROOT_HASH, KeyLayout, chunk_hashes, chunk_keys
from warmers.salts import check_salt

FIRST = "084547b6c40ed5b05ba8cd0305db5bf74d5617673948d9ed193ab7d6cbc484d4"
IDS = np.arange(256, dtype=np.uint32)


def test_golden_values():
    assert ROOT_HASH.hex() == "7e3eff9ef7613a50340eb12677ee03b83ac759fcba9bb32705f07248d56d473b"
    assert chunk_hashes(IDS, 256)[0].tobytes().hex() == FIRST


@pytest.mark.parametrize(
    ("layout", "salt", "expected"),
    [
        (KeyLayout("m"), "", [f"m@01000100@0@{FIRST}"]),
        (KeyLayout("/a/b", prefix="ns"), "s1", [f"ns@/a/b@01000100@0@{FIRST}@s1"]),
        (KeyLayout("m", world_size=2), "", [f"m@02000200@0@{FIRST}", f"m@02010201@0@{FIRST}"]),
        (KeyLayout("/a/b", store="fs"), "", [f"-SEP-a-SEP-b@0x01000100@0@{FIRST}.data"]),
        (KeyLayout("/a/b", store="fs"), "s1", [f"-SEP-a-SEP-b@0x01000100@0@{FIRST}@s1.data"]),
        (KeyLayout("/a/b", store="s3"), "s1", [f"/a/b@01000100@0@{FIRST}@s1"]),
    ],
)
def test_key_forms(layout, salt, expected):
    assert list(chunk_keys(IDS, layout, salt)) == expected


def test_a_key_that_no_file_could_bear_is_refused():
    salt = "s" * 128
    assert len(next(iter(chunk_keys(IDS, KeyLayout("m" * 43, store="fs"), salt)))) == 255
    with pytest.raises(ConfigError, match="256 characters"):
        list(chunk_keys(IDS, KeyLayout("m" * 44, store="fs"), salt))
    assert list(chunk_keys(IDS, KeyLayout("m" * 44), salt))


@pytest.mark.parametrize("salt", ["a@b", "a/b", "a\\b", "a\0b", "x" * 129])
def test_a_salt_the_engine_would_refuse_is_refused(salt):
    with pytest.raises(ValueError, match="salt"):
        check_salt(salt)


@pytest.mark.parametrize("arguments", [{"prefix": "a@b"}, {"prefix": "p", "store": "s3"}, {"chunk_tokens": 0}])
def test_a_layout_no_daemon_writes_is_refused(arguments):
    with pytest.raises(ValueError, match=r"prefix|positive"):
        KeyLayout("m", **arguments)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=70), st.integers(0, 69), st.integers(1, 9))
def test_a_hash_covers_everything_before_it_and_nothing_behind(ids, at, chunk):
    ids = np.array(ids, np.uint32)
    before = chunk_hashes(ids, chunk)
    assert before.shape == (len(ids) // chunk, 32)
    if at < len(ids):
        changed = ids.copy()
        changed[at] ^= 1
        same = (chunk_hashes(changed, chunk) == before).all(axis=1)
        assert same.tolist() == [number < at // chunk for number in range(len(before))]


def test_big_and_little_endian_input_give_the_same_keys():
    assert (chunk_hashes(IDS.astype(">u4"), 16) == chunk_hashes(IDS, 16)).all()
