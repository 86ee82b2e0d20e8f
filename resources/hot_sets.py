"""Hot sets as files: one for each namespace in the state store, written whole, polled by whoever loads it.

Read without fsspec, since gates have a hundred megabytes for everything. What is in one is `warmers/hot_set.py`.
"""

import base64
import json
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from warmers.errors import StateUnavailable
from warmers.hot_set import HotPrefix, HotSet
from warmers.keys import TokenIds

FORMAT = 1
IDS = np.dtype("<u4")
NOTHING = np.empty(0, np.uint32)


def hot_set_path(namespace: str) -> str:
    """Where it is in the state store's tree."""
    return f"namespaces/{namespace}/hot_set.json"


def encode(hot: HotSet) -> bytes:
    """As JSON; token ids as base64 of deflated 32-bit numbers, a quarter of what they would take as text."""
    prefixes = [asdict(replace(prefix, ids=NOTHING)) | {"ids": _packed(prefix)} for prefix in hot.prefixes]
    return json.dumps(asdict(replace(hot, prefixes=())) | {"format": FORMAT, "prefixes": prefixes}).encode()


def decode(content: bytes) -> HotSet:
    """Raises ValueError for what is none, or of another format."""
    document: dict[str, Any] = json.loads(content)
    if document.pop("format", None) != FORMAT:
        raise ValueError(f"it is not of format {FORMAT}")
    prefixes = tuple(HotPrefix(**{**each, "ids": _unpacked(each["ids"])}) for each in document.pop("prefixes"))
    return HotSet(**document, prefixes=prefixes)


def _packed(prefix: HotPrefix) -> str:
    return base64.b64encode(zlib.compress(prefix.ids.astype(IDS).tobytes())).decode()


def _unpacked(text: str) -> TokenIds:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), IDS)


@dataclass(frozen=True, slots=True)
class HotSetFile:
    """One of them, by its path or s3:// URI. Satisfies warmers.gate.HotSetSource."""

    uri: str

    def read(self, known: str | None) -> tuple[HotSet, str] | None:
        """It and its version; None where that is the `known` one, or there is none yet. Raises StateUnavailable."""
        found = self._from_s3(known) if self.uri.startswith("s3://") else self._from_disk(known)
        if found is None:
            return None
        content, version = found
        try:
            return decode(content), version
        except (ValueError, KeyError, TypeError, zlib.error) as error:
            raise StateUnavailable(
                f"reading the hot set {self.uri}",
                seen=str(error),
                do="Prove once more with this version: warmfront prove.",
            ) from error

    def _from_disk(self, known: str | None) -> tuple[bytes, str] | None:
        path = Path(self.uri.removeprefix("file://"))
        try:
            stat = path.stat()
            version = f"{stat.st_ino}-{stat.st_mtime_ns}-{stat.st_size}"
            return None if version == known else (path.read_bytes(), version)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unavailable(error) from error

    def _from_s3(self, known: str | None) -> tuple[bytes, str] | None:
        from botocore.exceptions import BotoCoreError, ClientError

        from resources.s3 import error_code, s3_client

        bucket, _, key = self.uri.removeprefix("s3://").partition("/")
        condition = {"IfNoneMatch": known} if known else {}
        try:
            answer = s3_client().get_object(Bucket=bucket, Key=key, **condition)
            return answer["Body"].read(), answer["ETag"]
        except ClientError as error:
            if error_code(error) in ("304", "NotModified", "NoSuchKey", "404"):
                return None
            raise self._unavailable(error) from error
        except (BotoCoreError, OSError) as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: Exception) -> StateUnavailable:
        do = "Check address and access; it is asked for again."
        return StateUnavailable(f"reading the hot set {self.uri}", seen=f"{type(error).__name__}: {error}", do=do)
