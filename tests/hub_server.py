"""A server that speaks the part of the Hugging Face hub's file API that reading a repository needs."""

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

LARGE = (".safetensors",)


class Hub:
    """Repositories by name, each with directories by commit and branches; what was asked for; what to break."""

    def __init__(self):
        self.commits: dict[str, dict[str, Path]] = {}
        self.branches: dict[str, dict[str, str]] = {}
        self.asked: list[tuple[str, str]] = []
        self.token = ""
        self.cut_after: int | None = None

    def push(self, name, branch, commit, directory):
        """Make a directory the head of a branch."""
        self.commits.setdefault(name, {})[commit] = directory
        self.branches.setdefault(name, {})[branch] = commit

    def info(self, name, revision):
        commit = self.branches[name].get(revision, revision)
        siblings = []
        for path in sorted(self.commits[name][commit].iterdir()):
            content = path.read_bytes()
            entry = {"rfilename": path.name, "size": len(content), "blobId": hashlib.sha1(content).hexdigest()}  # noqa: S324
            if path.suffix in LARGE:
                entry["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
            siblings.append(entry)
        return {"id": name, "sha": commit, "siblings": siblings}


@contextmanager
def serve(hub):
    """Serve it; its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            hub.asked.append((self.path, self.headers.get("Range", "")))
            if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
                return self.answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
            parts = self.path.partition("?")[0].strip("/").split("/")
            name = "/".join(parts[2:4]) if parts[0] == "api" else "/".join(parts[:2])
            try:
                if parts[0] == "api":
                    return self.answer(200, json.dumps(hub.info(name, parts[5])).encode())
                content = (hub.commits[name][parts[3]] / parts[4]).read_bytes()
            except (KeyError, FileNotFoundError):
                return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            start = int(self.headers.get("Range", "bytes=0-")[6:].partition("-")[0])
            status = 206 if "Range" in self.headers else 200
            return self.answer(status, content[start:], cut=hub.cut_after)

        do_HEAD = do_GET

        def answer(self, status, body, headers=(), cut=None):
            self.send_response(status)
            for key, value in {**dict(headers), "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if cut is not None and len(body) > cut:
                self.wfile.write(body[:cut])
                self.close_connection = True
                return
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
