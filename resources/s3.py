"""A boto3 client for buckets of weights, and what its errors mean."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from warmers.errors import BucketRefused, BucketUnavailable

CONNECTIONS = 8
PASSING = {
    *("RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable", "Throttling", "RequestLimitExceeded"),
    *("InvalidPart", "NoSuchUpload"),  # what was sent before is not all there any more
}
EMBEDDED_CREDENTIALS = {"aws_access_key_id": "embedded", "aws_secret_access_key": "embedded"}
HELP = {
    "AccessDenied": "Give the role the permissions that the README lists.",
    "ExpiredToken": "Renew the credentials and run again: what was sent is found.",
    "NoSuchBucket": "Correct the bucket's name, or make it.",
    "RequestTimeTooSkewed": "Set this machine's clock, and run again.",
}


@cache
def s3_client(endpoint: str | None = None, connections: int = CONNECTIONS) -> Any:
    """One for the process, the endpoint and how many requests are under way at once.

    Without an endpoint all comes from the environment, as boto3 finds it. With one it is the embedded stack's server,
    which checks no credentials and is given none of ours.
    """
    import boto3
    from botocore.config import Config

    retries = {"mode": "standard", "total_max_attempts": 5}
    config = Config(connect_timeout=5, read_timeout=60, retries=retries, max_pool_connections=connections)
    embedded = {"endpoint_url": endpoint, "region_name": "us-east-1", **EMBEDDED_CREDENTIALS} if endpoint else {}
    return boto3.client("s3", config=config, **embedded)


@contextmanager
def s3_failures(doing: str) -> Iterator[None]:
    """Raise BucketRefused for what somebody has to change first, BucketUnavailable for the rest."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        code, status = error_code(error), error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        seen = f"{code}: {error.response.get('Error', {}).get('Message', '')}".rstrip(": ")
        if code in PASSING or status >= 500 or status in (409, 412, 429):
            raise BucketUnavailable(doing, seen=seen, do="Run again: what was sent is found.") from error
        raise BucketRefused(doing, seen=seen, do=HELP.get(code, "Correct bucket, prefix or permissions.")) from error
    except (BotoCoreError, OSError) as error:
        seen = f"{type(error).__name__}: {error}"
        raise BucketUnavailable(
            doing, seen=seen, do="Check the endpoint; run again: what was sent is found."
        ) from error


def error_code(error: Any) -> str:
    """S3's name for an error."""
    return str(error.response.get("Error", {}).get("Code", "unknown"))
