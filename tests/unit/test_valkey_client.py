"""How the engine's side of Valkey authenticates and reads; real servers: integration/test_valkey_plugin."""

import datetime
import itertools
import time

import botocore.auth
import pytest
from botocore.credentials import Credentials
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import ConnectionError, ResponseError
from warmfront_engine import valkey_client as client
from warmfront_engine import valkey_read

from resources.valkey_credentials import ElastiCacheToken, presigned


@pytest.mark.parametrize("serverless", [True, False])
def test_its_token_is_the_control_planes_which_is_botocores(serverless, monkeypatch):
    moment = datetime.datetime(2026, 12, 1, 12, 0, tzinfo=datetime.UTC)
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *_, **__: moment.replace(tzinfo=None))
    credentials = Credentials("AKID", "SECRET", "SESSION")
    user = client.IamToken("engine", client.Iam("kv-cache", "eu-central-1", serverless), lambda: credentials)
    token = presigned(ElastiCacheToken("engine", "kv-cache", "eu-central-1", serverless), credentials)
    assert user.get_credentials() == ("engine", token)
    assert token not in repr(user)


def test_a_token_is_made_anew_before_it_ends_and_not_each_time(monkeypatch):
    asked, now = [], [1_000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    find = lambda: asked.append(1) or Credentials(f"AKID{len(asked)}", "SECRET")  # noqa: E731
    user = client.IamToken("engine", client.Iam("kv-cache", "eu-central-1"), find)
    first = {user.get_credentials() for _ in range(3)}
    assert len(first) == len(asked) == 1
    now[0] += client.REFRESH_S + 1
    assert user.get_credentials() not in first
    assert client.REFRESH_S < client.TOKEN_S


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({}, "host is missing"),
        ({"host": "h", "hots": 1}, "hots unknown"),
        ({"host": "h", "password": "secret"}, "password unknown"),
        ({"host": "h", "password_env": "A", "password_file": "/b"}, "exclude each other"),
        ({"host": "h", "iam": {"cache_name": "c", "region": "r"}}, "iam needs tls and a username"),
        ({"host": "h", "key_prefix": "a@b"}, "key_prefix may not contain @"),
    ],
)
def test_parameters_that_cannot_be_meant_are_named(params, says):
    with pytest.raises(ValueError, match=says):
        client.Where.parse(params)


class Replies:
    """A socket that gives what was sent in pieces of any size."""

    def __init__(self, sent, pieces):
        self.left, self.pieces = bytearray(sent), itertools.cycle(pieces)

    def recv_into(self, into):
        count = min(next(self.pieces), len(into), len(self.left))
        into[:count], self.left = self.left[:count], self.left[count:]
        return count


pieces = st.lists(st.integers(1, 300), min_size=1, max_size=5)


@given(st.binary(max_size=400), pieces)
def test_a_value_fills_its_place_and_nothing_is_left_behind(value, pieces):
    place, replies = bytearray(len(value)), Replies(b"$%d\r\n%s\r\n" % (len(value), value), pieces)
    assert valkey_read._bulk(replies.recv_into, memoryview(place))
    assert (bytes(place), bytes(replies.left)) == (value, b"")


@given(st.sampled_from([b"$-1\r\n", b"_\r\n"]), pieces)
def test_what_is_not_there_is_a_miss_and_nothing_is_left_behind(sent, pieces):
    place, replies = bytearray(b"as it was"), Replies(sent, pieces)
    assert not valkey_read._bulk(replies.recv_into, memoryview(place))
    assert (bytes(place), bytes(replies.left)) == (b"as it was", b"")


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"$8\r\n12345678\r\n", valkey_read._OtherSize),
        (b"$10\r\n1234567890\r\n", valkey_read._OtherSize),
        (b"-MOVED 1 h:1\r\n", ResponseError),
        (b"-" + b"x" * 99 + b"\r\n", ResponseError),
        (b"+\r\n", ResponseError),
    ],
)
@given(pieces)
def test_what_is_no_value_of_that_size_leaves_the_place_alone(sent, error, pieces):
    place, replies = bytearray(b"as it was"), Replies(sent, pieces)
    with pytest.raises(error):
        valkey_read._bulk(replies.recv_into, memoryview(place))
    assert bytes(place) == b"as it was"


@given(st.integers(0, 12), pieces)
def test_a_connection_that_is_cut_in_a_value_is_said(kept, pieces):
    replies = Replies(b"$9\r\n123456789\r\n"[:kept], pieces)
    with pytest.raises(ConnectionError):
        valkey_read._bulk(replies.recv_into, memoryview(bytearray(9)))
