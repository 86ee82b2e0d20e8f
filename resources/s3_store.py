"""A bucket as L2, through boto3. Stages of weights are another matter (`resources/stages.py`)."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from os.path import commonprefix
from time import time
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from resources.s3 import error_code, s3_client, s3_failures
from warmers.errors import BucketRefused, BucketUnavailable, ConfigError, StoreUnavailable
from warmers.presence import StoreUsage

ASKED_AT_ONCE = 32
HEADS_PER_LISTING = 10
"""A page of a listing costs as much as about a dozen HEADs: $0.005 against $0.0004 a thousand (us-east-1, standard)."""
EXPRESS = re.compile(r"--(?P<zone>[a-z0-9-]+)--x-s3$")
"""Of a directory bucket's name, as AWS's naming rules have it."""
DAY_S = 86_400
T = TypeVar("T")


@dataclass(frozen=True)
class S3Store:
    """One bucket; a key is the object's. Satisfies warmers.presence.KVStore."""

    bucket: str
    ttl_days: int | None = None
    """After which the bucket's lifecycle rule removes what was not written since; None: there is none."""
    endpoint: str | None = None
    """Of the embedded stack's server; None: S3, as the environment says."""

    @cached_property
    def client(self) -> Any:
        """Of boto3."""
        return s3_client(self.endpoint, ASKED_AT_ONCE)

    @property
    def express(self) -> bool:
        """Whether it is a directory bucket of S3 Express One Zone."""
        return EXPRESS.search(self.bucket) is not None

    def sizes(self, keys: Sequence[str]) -> NDArray[np.int64]:
        """By listing what they have in common where that is cheaper, else a HEAD each."""
        found = None if self.express else self._listed(set(keys))
        if found is None:
            return np.array(self._each("asking for sizes", keys, lambda head: head["ContentLength"]), np.int64)
        return np.array([found.get(key, -1) for key in keys], np.int64)

    def lives(self, keys: Sequence[str]) -> NDArray[np.float64]:
        """What is left of `ttl_days` since each was last written, or copied onto itself; the rule acts once a day."""
        now, ttl_s = time(), float("inf") if self.ttl_days is None else self.ttl_days * DAY_S

        def left(head: dict[str, Any]) -> float:
            return float(max(0.0, head["LastModified"].timestamp() + ttl_s - now))

        return np.array(self._each("asking for the life", keys, left), np.float64)

    def extend(self, keys: Sequence[str], seconds: NDArray[np.int64]) -> None:
        """Copy each onto itself: all objects live equally long."""

        def copy(key: str) -> None:
            source = {"Bucket": self.bucket, "Key": key}
            with _absent_is_none():
                self.client.copy_object(Bucket=self.bucket, Key=key, CopySource=source, MetadataDirective="REPLACE")

        self._at_once("extending", keys, copy)

    def delete(self, keys: Sequence[str]) -> None:
        """One by one: S3 charges nothing for it, and not every server takes many at once."""
        self._at_once("deleting", keys, lambda key: self.client.delete_object(Bucket=self.bucket, Key=key))

    def names(self, start: str) -> Iterator[list[str]]:
        """A page of a listing at a time. Directory buckets list by whole folders alone."""
        folder, slash, _ = start.rpartition("/")
        for page in self._pages(folder + slash if self.express else start):
            yield [entry["Key"] for entry in page if entry["Key"].startswith(start)]

    def usage(self) -> StoreUsage:
        """A bucket has no bound, and counts its bytes once a day; what its lifecycle rule says, if one may ask."""
        if self.endpoint is not None or self.ttl_days is None:
            return StoreUsage()
        rules = self._rules()
        days = [rule["Expiration"]["Days"] for rule in rules or () if _expires_all(rule)]
        if rules is None or (days and min(days) == self.ttl_days):
            return StoreUsage()
        seen = f"expires objects after {min(days)} days" if days else "expires nothing"
        return StoreUsage(findings=(f"bucket {self.bucket} {seen}, and l2.ttl_days is {self.ttl_days}: {self._put()}",))

    def _rules(self) -> list[dict[str, Any]] | None:
        """The bucket's lifecycle rules; None where it does not say."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            found: list[dict[str, Any]] = self.client.get_bucket_lifecycle_configuration(Bucket=self.bucket)["Rules"]
        except ClientError as error:  # a bucket with none, a user who may not ask, a server that knows no rules
            return [] if error_code(error) == "NoSuchLifecycleConfiguration" else None
        except BotoCoreError:  # whoever asks for keys next says what it is
            return None
        return found

    def _put(self) -> str:
        """The command that puts the rule; it replaces those that there are."""
        rule = json.dumps(lifecycle_rules(self.ttl_days or 1))
        return f"aws s3api put-bucket-lifecycle-configuration --bucket {self.bucket} --lifecycle-configuration '{rule}'"

    def require_writable(self, start: str) -> None:
        """Put an object, and delete it."""
        with _failures(f"writing to s3://{self.bucket}"):
            self.client.put_object(Bucket=self.bucket, Key=f"{start}warmfront-probe", Body=b"")
        self.delete([f"{start}warmfront-probe"])

    def _listed(self, wanted: set[str]) -> dict[str, int] | None:
        """Sizes of those of `wanted` that are there; None where a HEAD each costs less."""
        if len(wanted) < HEADS_PER_LISTING:
            return None
        found: dict[str, int] = {}
        start = commonprefix([min(wanted), max(wanted)])  # noqa: RUF071 - of strings, not of paths
        for number, page in enumerate(self._pages(start)):
            if number > len(wanted) // HEADS_PER_LISTING:
                return None
            found.update((entry["Key"], entry["Size"]) for entry in page if entry["Key"] in wanted)
        return found

    def _pages(self, start: str) -> Iterator[list[dict[str, Any]]]:
        with _failures(f"listing s3://{self.bucket}/{start}"):
            for page in self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=start):
                yield page.get("Contents", [])

    def _each(self, doing: str, keys: Sequence[str], see: Callable[[dict[str, Any]], T]) -> list[T | int]:
        def head(key: str) -> T | int:
            with _absent_is_none():
                return see(self.client.head_object(Bucket=self.bucket, Key=key))
            return -1

        return self._at_once(doing, keys, head)

    def _at_once(self, doing: str, keys: Sequence[str], act: Callable[[str], T]) -> list[T]:
        failures = _failures(f"{doing} of {len(keys)} objects in s3://{self.bucket}")
        with failures, ThreadPoolExecutor(ASKED_AT_ONCE, "objects") as pool:
            return list(pool.map(act, keys))


def lifecycle_rules(ttl_days: int) -> dict[str, Any]:
    """A bucket's lifecycle configuration: what was not written for `ttl_days` goes, unfinished uploads after a day."""
    rule = {"ID": "kv-chunks", "Status": "Enabled", "Filter": {}, "Expiration": {"Days": ttl_days}}
    return {"Rules": [rule | {"AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1}}]}


def _expires_all(rule: dict[str, Any]) -> bool:
    """Whether it removes whatever is in the bucket, by age."""
    narrowed = rule.get("Prefix") or any((rule.get("Filter") or {}).values())
    return rule["Status"] == "Enabled" and not narrowed and "Days" in rule.get("Expiration", {})


@contextmanager
def _absent_is_none() -> Iterator[None]:
    from botocore.exceptions import ClientError

    try:
        yield
    except ClientError as error:
        if error_code(error) not in ("404", "NoSuchKey", "NotFound"):
            raise


@contextmanager
def _failures(doing: str) -> Iterator[None]:
    try:
        with s3_failures(doing):
            yield
    except BucketRefused as error:
        raise ConfigError(error.attempted, seen=error.seen, do=error.do) from error
    except BucketUnavailable as error:
        do = "Check the endpoint; wait where it asks for fewer requests. The next run goes on where this one stopped."
        raise StoreUnavailable(error.attempted, seen=error.seen, do=do) from error
