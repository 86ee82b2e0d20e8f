"""Objects in a bucket, through s3fs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from resources.objects import Stamp, unavailable
from warmers.errors import StateUnavailable

PATIENCE = {"connect_timeout": 5, "read_timeout": 10, "retries": {"mode": "standard", "total_max_attempts": 2}}
"""For botocore: by default it takes 9 s to see that nobody is there, and five minutes that nobody answers. A heartbeat
has ten seconds and a sensor's tick a minute."""


@dataclass(frozen=True)
class S3Objects:
    """A bucket and prefix, through s3fs; conditional writes by If-Match and If-None-Match."""

    root: str
    """bucket/prefix."""

    def __str__(self) -> str:
        return f"s3://{self.root}"

    @cached_property
    def files(self) -> Any:
        import s3fs

        files = s3fs.S3FileSystem(use_listings_cache=False, config_kwargs=PATIENCE)
        files.retries = 1  # botocore has tried again already
        return files

    def _call(self, method: str, path: str, **arguments: Any) -> Any:
        """Raises FileNotFoundError for what is not there."""
        bucket, _, prefix = self.root.partition("/")
        key = f"{prefix}/{path}" if prefix else path
        with _telling(method, f"s3://{bucket}/{key}"):
            return self.files.call_s3(method, Bucket=bucket, Key=key, **arguments)

    def read(self, path: str) -> tuple[bytes, str] | None:
        """Content and ETag."""
        from fsspec.asyn import sync

        try:
            answer = self._call("get_object", path)
            with _telling("get_object", f"{self}/{path}"):
                return sync(self.files.loop, answer["Body"].read), answer["ETag"]
        except FileNotFoundError:
            return None

    def write(self, path: str, content: bytes) -> None:
        """One PUT: whole or not at all."""
        try:
            self._call("put_object", path, Body=content)
        except FileNotFoundError as error:
            raise unavailable("put_object", f"{self}/{path}", error) from error

    def replace(self, path: str, content: bytes, version: str | None) -> bool:
        """A conditional PUT."""
        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        try:
            self._call("put_object", path, Body=content, **condition)
        except StateUnavailable as error:
            if _status(error.__cause__) in (409, 412):  # the condition is not met, or somebody else is at it
                return False
            raise
        except FileNotFoundError as error:
            if version is None:  # no such bucket; with a version the object is gone, which is another version
                raise unavailable("put_object", f"{self}/{path}", error) from error
            return False
        return True

    def list(self, directory: str) -> list[str]:
        """Keys below a prefix."""
        try:
            with _telling("listing", f"{self}/{directory}"):
                found = self.files.find(f"{self.root}/{directory}")
        except FileNotFoundError:
            return []
        return sorted(path.removeprefix(f"{self.root}/") for path in found)

    def delete(self, path: str) -> None:
        """DELETE succeeds for absent keys too."""
        self._call("delete_object", path)

    def stamps(self) -> dict[str, Stamp]:
        """By ETag and size."""
        try:
            with _telling("listing", self):
                found = self.files.find(self.root, detail=True)
        except FileNotFoundError as error:
            raise unavailable("listing", self, error) from error
        named = ((path.removeprefix(f"{self.root}/"), info) for path, info in found.items())
        return {
            name: Stamp(f"{info['ETag']}-{info['size']}", info["LastModified"].timestamp())
            for name, info in named
            if not any(part.startswith(".") or not part for part in name.split("/"))
        }


@contextmanager
def _telling(doing: str, target: object) -> Iterator[None]:
    """Turn what goes wrong into StateUnavailable, but for FileNotFoundError."""
    from aiohttp import ClientError as ConnectionFailed
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except FileNotFoundError:
        raise
    except (OSError, BotoCoreError, ClientError, ConnectionFailed) as error:
        raise unavailable(doing, target, error) from error


def _status(error: BaseException | None) -> int | None:
    """Of S3's answer; s3fs makes OSErrors of some, with the answer as their cause."""
    cause = error if error is None or hasattr(error, "response") else error.__cause__
    response = getattr(cause, "response", None) or {}
    status: int | None = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status
