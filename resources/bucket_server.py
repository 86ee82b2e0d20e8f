"""The embedded stack's S3 for L2: one bucket under its own address, as LMCache's s3 adapter asks for it.

    python -m resources.bucket_server PORT BUCKET DIRECTORY

LMCache (0.5.6) knows virtual-hosted addresses alone, where host and port are the bucket's and the whole path is the
key. `localbucket`, which does the work, knows path-style ones alone. Takes either, so that boto3 can look into it too.
For trying and for tests, as the server behind it.
"""

import sys
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from localbucket import S3Handler

ROOT = "%2F"
"""Directory of keys that begin with a slash, as those of a model in an absolute path do; localbucket refuses them."""


class BucketHandler(S3Handler):  # type: ignore[misc]
    """One request."""

    bucket = ""

    def parse_request(self) -> bool:
        """Put the bucket in front of a path that is the key alone."""
        parsed: bool = super().parse_request()
        if parsed:
            asked = self.requestline.split(" ")[1]  # http.server takes two slashes at the start for one
            owned = asked.startswith((f"/{self.bucket}/", f"/{self.bucket}?")) or asked == f"/{self.bucket}"
            self.path = asked if owned else f"/{self.bucket}{asked}"
        return parsed

    def _object_path(self, bucket: str, key: str) -> Path:
        path: Path = super()._object_path(bucket, f"{ROOT}{key}" if key.startswith("/") else key)
        return path

    def _list_entries(self, directory: Path, prefix: str, *more: Any) -> Any:
        prefix = f"{ROOT}{prefix}" if prefix.startswith("/") else prefix
        contents, *rest = super()._list_entries(directory, prefix, *more)
        return [(key.removeprefix(ROOT), path) for key, path in contents], *rest


def main(port: int, bucket: str, directory: Path) -> None:
    """Serve until interrupted."""
    (directory / bucket).mkdir(parents=True, exist_ok=True)
    S3Handler.data_root, BucketHandler.bucket = directory.resolve(), bucket
    with ThreadingHTTPServer(("127.0.0.1", port), BucketHandler) as server:
        server.serve_forever()


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
    except KeyboardInterrupt:
        sys.exit(0)
