import pytest

from resources.kv_store import ValkeyStore
from warmers.errors import ConfigError, StoreUnavailable


def test_sizes_and_deletion_over_many_batches(valkey):
    keys = [f"ns@m@{n}" for n in range(12_000)]
    pipeline = valkey.client.pipeline(transaction=False)
    for n, key in enumerate(keys):
        if n % 3:
            pipeline.set(key, b"x" * (n % 3))
    pipeline.execute()
    assert valkey.sizes(keys).tolist() == [n % 3 or -1 for n in range(12_000)]
    assert valkey.delete(keys) == 8_000
    assert (valkey.sizes(keys) == -1).all()
    assert valkey.sizes([]).tolist() == []


def test_a_store_that_is_away_says_so():
    away = ValkeyStore("redis://127.0.0.1:1")
    assert not away.ping()
    with pytest.raises(StoreUnavailable, match=r"asking for sizes of 1 keys in Valkey at redis://127\.0\.0\.1:1"):
        away.sizes(["a"])


def test_a_password_comes_from_the_environment_and_shows_nowhere(monkeypatch):
    store = ValkeyStore("redis://127.0.0.1:1", "user", "WF_TEST_PASSWORD")
    with pytest.raises(ConfigError, match="WF_TEST_PASSWORD, which is not set"):
        store.sizes(["a"])
    monkeypatch.setenv("WF_TEST_PASSWORD", "hush-hush")
    with pytest.raises(StoreUnavailable) as error:
        store.sizes(["a"])
    assert "hush" not in f"{error.value} {store!r}"


def test_an_error_in_the_middle_and_a_cut_connection_leave_no_answer_behind(valkey):
    valkey.client.set("text", b"12345")
    valkey.client.rpush("list", 1, 2)
    with pytest.raises(StoreUnavailable, match="WRONGTYPE"):
        valkey.sizes(["absent", "list", "text", "text"])
    assert valkey.sizes(["text", "absent"]).tolist() == [5, -1]
    valkey.client.client_kill_filter(_type="normal", skipme=False)
    assert valkey.sizes(["absent", "text"]).tolist() == [-1, 5]
    assert valkey.delete(["text", "list", "absent"]) == 2
