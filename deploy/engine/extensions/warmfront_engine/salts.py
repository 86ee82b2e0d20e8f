"""Give every LoRA adapter its own KV: a middleware of vLLM that sets `cache_salt` by the model a request names.

LMCache's keys (MP mode, 0.5.6) do not hold the adapter, so without a salt an adapter is answered from the base
model's KV, and the reverse: silently, with other tokens. Start the engine with

    WARMFRONT_SALTS=/etc/warmfront/salts.json  ...  --middleware warmfront_engine.salts.CacheSalts

    {"base": ["llama"], "salts": {"sql-adapter": "sql-3f9c", "chat-adapter": "chat-77aa"}}

`base` are the names of --served-model-name, which need no salt. The file is read again whenever it changes; replace it
by rename, and put an adapter's name in before it is loaded. A salt belongs to an adapter's *weights*, which the engine
keeps as it loaded them: new weights are a new salt and a new process, or a new name. So a table that gives another salt
to a name that this process has known is not taken. What the engine serves beyond the table is refused, since it would
be answered wrongly.

Paths were read from vLLM 0.32. Those that use KV and accept no salt refuse adapters (/v2/embed, /cohere/v2/chat,
/v1/audio/*, whatever a plugin adds). /invocations drops the body's `model` and takes the adapter from a header.
Not seen from here: an adapter that carries a modality's name (--default-mm-loras), which vLLM also applies to requests
for the base model, and vLLM's gRPC server, which has no middleware. Runs before vLLM asks for the API key.

Only the standard library is imported, so that it can be tested without an engine.
"""

import json
import logging
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

Message = dict[str, Any]
Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

TABLE_VARIABLE = "WARMFRONT_SALTS"
LIMIT_VARIABLE = "WARMFRONT_SALTS_BODY_BYTES"
BODY_BYTES = 64 * 1024**2
"""Held in memory for each request. vLLM has no limit of its own; what is longer is refused."""
HEADER = b"x-warmfront-salts"
SEEN = "warmfront.salts"

SALTED = frozenset(
    {
        *("/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions", "/v1/responses", "/v1/messages"),
        *("/inference/v1/generate", "/v1/systemone", "/generative_scoring"),
        *("/v1/embeddings", "/pooling", "/classify"),
        *("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
    }
)
"""They declare `cache_salt` and hand it to the engine."""
WITHOUT_KV = frozenset(
    {
        *("/tokenize", "/detokenize", "/v1/messages/count_tokens"),
        *("/v1/chat/completions/render", "/v1/completions/render", "/v1/responses/render", "/v1/messages/render"),
        *("/v1/chat/completions/derender", "/v1/completions/derender", "/cohere/v2/chat/render"),
    }
)
"""They name a model and compute nothing. A rendered request is salted when it comes back to be generated."""
INVOCATIONS = "/invocations"
ADAPTER_HEADER = b"x-amzn-sagemaker-adapter-identifier"

SALT_CHARS = 128
FORBIDDEN = frozenset("@/\\\0")
"""Both are vLLM's rules (generate/base/protocol.py)."""
HEAD_CHARS = 64
SALT = re.compile(r"[^.@/\\\0]{1,63}")
"""No dot, so that the first one ends an adapter's salt; short enough to leave a digest (64 characters) its place."""
FORM_MODEL = re.compile(
    rb'^content-disposition:[^\r\n]*;\s*name="?model"?(?:;[^\r\n]*)?\r\n(?:[^\r\n]+\r\n)*\r\n(.*?)\r\n--',
    re.IGNORECASE | re.MULTILINE | re.DOTALL,
)

log = logging.getLogger("vllm.warmfront.salts")
"""Under vLLM's, which has a handler: its SageMaker package raises the root logger to ERROR."""


class Refused(Exception):
    """The request is answered here, with an error in OpenAI's form."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        # Never 5xx: a mistyped name must not look like a sick pod to a load balancer.
        super().__init__(message)
        self.param = param
        self.status = status

    async def answer(self, send: Send) -> None:
        """Send it."""
        error = {"message": str(self), "type": "BadRequestError", "param": self.param, "code": self.status}
        body = json.dumps({"error": error}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@dataclass(frozen=True, slots=True)
class Table:
    """Which model has which salt."""

    salts: Mapping[str, str]
    base: frozenset[str]
    digest: str
    """First 12 hex digits of the file's SHA-256."""

    @classmethod
    def parse(cls, raw: bytes) -> "Table":
        """Raises ValueError, which says what is wrong with it."""
        document = json.loads(raw)
        salts, base = (document.get(key) if isinstance(document, dict) else None for key in ("salts", "base"))
        if not isinstance(salts, dict) or not isinstance(base, list) or not all(isinstance(name, str) for name in base):
            raise ValueError('it is not {"base": [name, ...], "salts": {name: salt, ...}}')
        for name, salt in salts.items():
            if not isinstance(salt, str) or not SALT.fullmatch(salt):
                raise ValueError(f"the salt of {name!r} is not 1 to 63 characters without . @ / \\ and NUL")
        if len(set(salts.values())) < len(salts):
            raise ValueError("two adapters have the same salt")
        if both := salts.keys() & set(base):
            raise ValueError(f"{', '.join(sorted(both))}: both in base and in salts")
        return cls(salts, frozenset(base), sha256(raw).hexdigest()[:12])

    def require_base(self, route: str, model: Any, own: Any) -> None:
        """Raise Refused unless an unsalted request is for the base model, named or not, with no adapter's salt."""
        if isinstance(model, str) and model and model not in self.base:
            raise Refused(self._why_not(route, model), "model")
        if isinstance(own, str) and own.split(".")[0] in self.salts.values():
            raise Refused("This cache_salt belongs to an adapter. Use one that begins otherwise.", "cache_salt")

    def _why_not(self, route: str, model: str) -> str:
        if model not in self.salts:
            return (
                f"The model `{model}` is neither in `base` nor in `salts` of the engine's salt table ({self.digest}). "
                "An adapter without a salt would be answered from another model's KV. Correct the name, or add it to "
                f"the file that {TABLE_VARIABLE} names, which is read again at once."
            )
        if route == INVOCATIONS:
            return f"{route} ignores the body's model: name the adapter `{model}` in {ADAPTER_HEADER.decode()}."
        return f"{route} takes no cache_salt: the adapter `{model}` would be answered from another model's KV."


UNREADABLE = Table({}, frozenset(), "unreadable")
"""Stands in for a table that was never read whole: knows nobody, so every named model is refused."""


@dataclass(slots=True)
class TableFile:
    """The table in a file; the last good one when the file breaks or goes."""

    path: Path
    table: Table | None = None
    """None: there never was a file."""
    state: Any = None
    """What the file looked like when it was last read, well or badly: each state is read, and logged, once."""
    known: dict[str, str] = field(default_factory=dict)
    """Every salt that was in force since the process began, by name."""

    def current(self) -> Table | None:
        """The table in force; costs a stat."""
        try:
            stat = self.path.stat()
            state: Any = (stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size)
        except OSError as error:
            state = error.errno
        if state != self.state:
            self.state = state
            self.table = self._read()
        return self.table

    def _read(self) -> Table | None:
        try:
            table = Table.parse(self.path.read_bytes())
            if other := [name for name in self.known if table.salts.get(name, self.known[name]) != self.known[name]]:
                raise ValueError(f"another salt for {', '.join(other)}, whose weights are loaded: start a new process")
        except FileNotFoundError:
            kept = self.table
            log.warning("cache salts: there is no %s; %s", self.path, _in_force(kept))
        except (OSError, ValueError) as error:
            kept = self.table or UNREADABLE
            log.warning("cache salts: cannot read %s: %s; %s", self.path, error, _in_force(kept))
        else:
            self.known |= table.salts
            log.info("cache salts: table %s of %d adapters is in force", table.digest, len(table.salts))
            return table
        return kept


def _in_force(table: Table | None) -> str:
    return "every request passes unsalted" if table is None else f"table {table.digest} stays in force"


def combined(salt: str, own: str | None) -> str:
    """An adapter's salt with the client's own: `salt.own`, from 128 characters on its head and its SHA-256.

    No two pairs of them come out the same: a salt has no dot, and what is shortened, and only that, has exactly 128
    characters. `own` may be the adapter's salt itself, as of a client that already knows it. A forbidden character is
    kept, for the engine to refuse.
    """
    if own is None or own == salt:
        return salt
    whole = f"{salt}.{own}"
    if len(whole) < SALT_CHARS or FORBIDDEN & set(own):
        return whole
    return whole[:HEAD_CHARS] + sha256(whole.encode("utf-8", "surrogatepass")).hexdigest()


def salted(table: Table, route: str, headers: Mapping[bytes, bytes], body: bytes) -> bytes:
    """The body with the salt of the adapter it asks for; the very same body when there is nothing to set.

    Raises Refused for what would be answered wrongly. What cannot be read is left to the engine's own error.
    """
    if headers.get(b"content-type", b"").lower().startswith(b"multipart/form-data"):
        table.require_base(route, _form_model(body), None)
        return body
    document = _document(body)
    if document is None:
        return body
    adapter = headers.get(ADAPTER_HEADER) if route == INVOCATIONS else None
    model = document.get("model") if adapter is None else adapter.decode("latin-1")
    salts = table.salts if route in SALTED or adapter is not None else {}
    salt, own = salts.get(model) if isinstance(model, str) else None, document.get("cache_salt")
    if salt is None:
        table.require_base(route, model, own)
        return body
    if own is not None and (not isinstance(own, str) or not own):
        return body
    return _with_salt(body, combined(salt, own))


def _document(body: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _form_model(body: bytes) -> str | None:
    names = FORM_MODEL.findall(body)
    return names[-1].decode("utf-8", "replace") if names else None  # the last of several counts, as in JSON


def _with_salt(body: bytes, salt: str) -> bytes:
    """One member more, at the end: of two with one name the engine's parser, which is Python's, takes the last."""
    text = body.decode(json.detect_encoding(body), "surrogatepass").rstrip()
    return f'{text[:-1]},"cache_salt":{json.dumps(salt)}}}'.encode("utf-8", "surrogatepass")


class CacheSalts:
    """The ASGI middleware. Every HTTP answer says which table it was given under, in `x-warmfront-salts`."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.limit = int(os.environ.get(LIMIT_VARIABLE, BODY_BYTES))
        path = os.environ.get(TABLE_VARIABLE)
        self.file = TableFile(Path(path)) if path else None
        if self.file is None:
            log.warning("cache salts: %s is not set; %s", TABLE_VARIABLE, _in_force(None))
        else:
            self.file.current()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; one that came through here before is left alone."""
        if scope["type"] != "http" or SEEN in scope:
            return await self.app(scope, receive, send)
        table = self.file.current() if self.file else None
        scope, send = {**scope, SEEN: True}, _marking(send, table.digest if table else "none")
        route = _route(scope)
        if table is None or scope["method"] != "POST" or route in WITHOUT_KV:
            return await self.app(scope, receive, send)
        try:
            body = await _whole_body(receive, self.limit)
            if body is None:
                return None  # the client is gone
            new = salted(table, route, dict(reversed(scope["headers"])), body)  # the first of several counts
        except Refused as refused:
            return await refused.answer(send)
        if new is not body:
            scope["headers"] = _with_length(scope["headers"], len(new))
        await self.app(scope, _replaying(new, receive), send)


def _route(scope: Scope) -> str:
    """The path that the engine's router will see."""
    root: str = scope.get("root_path", "")
    path: str = scope["path"]
    return path[len(root) :] if path.startswith(f"{root}/") else path


def _marking(send: Send, digest: str) -> Send:
    async def marking(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (HEADER, digest.encode())]}
        await send(message)

    return marking


async def _whole_body(receive: Receive, limit: int) -> bytes | None:
    """All of it; None when the client left before its end. Raises Refused beyond `limit` bytes."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise Refused(f"The body is longer than {limit} bytes ({LIMIT_VARIABLE}).", status=413)
        if not message.get("more_body", False):
            return b"".join(parts)


def _replaying(body: bytes, receive: Receive) -> Receive:
    """The body at once, then what else comes: the client's disconnect."""
    first = [{"type": "http.request", "body": body, "more_body": False}]

    async def replaying() -> Message:
        return first.pop() if first else await receive()

    return replaying


def _with_length(headers: list[tuple[bytes, bytes]], length: int) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in headers if name not in (b"content-length", b"transfer-encoding")]
    return [*kept, (b"content-length", b"%d" % length)]
