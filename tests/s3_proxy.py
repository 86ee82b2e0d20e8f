"""Stands between a client and a real S3 server, and breaks what a test says."""

import threading
from collections.abc import Callable
from contextlib import contextmanager
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import httpx

STATUS = {"SlowDown": 503, "InternalError": 500, "ExpiredToken": 400, "AccessDenied": 403, "RequestTimeTooSkewed": 403}
OTHER_REGION = "eu-central-1"


class Request(NamedTuple):
    """What a fault is decided by."""

    number: int
    method: str
    path: str
    signed_for: str
    """The region."""

    @property
    def sends_a_part(self):
        return self.method == "PUT" and "partNumber" in self.path


Fault = Callable[[Request], str | None]
"""An error's code; `reset`; `lost`: the request is taken and forgotten; `elsewhere`: of another region; or None."""


@contextmanager
def between(url: str, fault: Fault):
    """Serve; the address to give to clients."""
    numbers, lock = iter(range(10**9)), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self):
            body = self._body()
            with lock:
                region = (self.headers.get("Authorization", "") + "////").split("/")[2]
                code = fault(Request(next(numbers), self.command, self.path, region))
            if code == "reset":
                self.close_connection = True
                self.connection.close()
                return
            if code == "lost":
                self.answer(200, b"", {"ETag": f'"{md5(body, usedforsecurity=False).hexdigest()}"'})
                return
            if code == "elsewhere":
                said = f"<Error><Code>AuthorizationHeaderMalformed</Code><Region>{OTHER_REGION}</Region></Error>"
                self.answer(400, said.encode(), {"x-amz-bucket-region": OTHER_REGION})
                return
            if code is not None:
                self.answer(
                    STATUS[code], f"<Error><Code>{code}</Code><Message>of the test</Message></Error>".encode(), {}
                )
                return
            skipped = {"host", "connection", "transfer-encoding", "expect", "content-length"}
            headers = {key: value for key, value in self.headers.items() if key.lower() not in skipped}
            answer = httpx.request(self.command, url + self.path, headers=headers, content=body, timeout=60)
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in {"connection", "transfer-encoding"}}
            self.answer(answer.status_code, answer.content, kept)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

        def handle_expect_100(self):
            self.send_response_only(100)
            self.end_headers()
            return True

        def _body(self):
            if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = []
            while size := int(self.rfile.readline().partition(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def answer(self, status, body, headers):
            self.send_response(status)
            length = headers.get("content-length", str(len(body)))
            for key, value in {**headers, "content-length": length}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
