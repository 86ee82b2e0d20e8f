"""A bucket as L2: what is its own beside what every tier promises (`test_stores.py`)."""

import json

import pytest

from resources.s3 import s3_client
from resources.s3_store import S3Store, lifecycle_rules
from warmers.inventory import headroom_findings


@pytest.fixture
def store(s3_uri):
    s3_client.cache_clear()
    yield S3Store(s3_uri.split("/")[2], 7)
    s3_client.cache_clear()


def put(store, rules):
    store.client.put_bucket_lifecycle_configuration(Bucket=store.bucket, LifecycleConfiguration=rules)


def test_a_bucket_that_expires_nothing_is_a_finding_with_the_command_that_mends_it(store):
    (finding,) = headroom_findings(store.usage(), 0, None)
    assert f"bucket {store.bucket} expires nothing, and l2.ttl_days is 7" in finding
    put(store, json.loads(finding.split("'")[1]))
    assert headroom_findings(store.usage(), 0, None) == []


def test_a_rule_that_says_something_else_is_one_too(store):
    put(store, lifecycle_rules(3))
    assert "expires objects after 3 days" in store.usage().findings[0]
    narrow = lifecycle_rules(7)
    narrow["Rules"][0]["Filter"] = {"Prefix": "logs/"}
    put(store, narrow)
    assert "expires nothing" in store.usage().findings[0]
    assert S3Store(store.bucket, None).usage().findings == ()


def test_who_may_not_ask_for_the_rule_is_told_nothing(store, monkeypatch):
    from botocore.exceptions import ClientError

    def refuse(**_):
        raise ClientError({"Error": {"Code": "AccessDenied"}}, "GetBucketLifecycleConfiguration")

    monkeypatch.setattr(store.client, "get_bucket_lifecycle_configuration", refuse)
    assert store.usage().findings == ()
