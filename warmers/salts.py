"""Salts keep apart, in L2's keys, what may not be answered from one KV: tenants, and LoRA adapters.

LMCache's keys do not hold the adapter, so each has a salt of its own. The engine's middleware sets it, whatever a
client sends (`deploy/engine/extensions/warmfront_engine/salts.py`). Its rule stands here once more, since that
distribution is installed where this one is not.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256

FORBIDDEN_IN_SALT = frozenset("@/\\\0")
MAX_SALT = 128
READABLE_CHARS = 32
"""Of an adapter's name, at the front of its salt."""
HEAD_CHARS = 64


def check_salt(salt: str) -> str:
    """Return `salt` as it may stand in a key; "" means none. Raises ValueError, as the engine answers 400."""
    if len(salt) > MAX_SALT or FORBIDDEN_IN_SALT & set(salt):
        raise ValueError(f"salt {salt[:40]!r}: at most {MAX_SALT} characters, none of @ / \\ or NUL")
    return salt


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter as a fleet serves it."""

    name: str
    """What clients put into "model"."""
    path: str
    """Where every replica has its files."""
    digest: str
    """Of its weights and their config."""
    rank: int

    @property
    def salt(self) -> str:
        """`<name>-<16 hex>`: its own for each revision, without the dot that ends it in `combined`."""
        readable = re.sub(r"[^A-Za-z0-9_-]", "-", self.name)[:READABLE_CHARS]
        return f"{readable}-{sha256(f'{self.name} {self.digest}'.encode()).hexdigest()[:16]}"


def combined(adapter_salt: str, own: str) -> str:
    """The salt in the keys of a request for an adapter that says `own`; "" is none.

    `salt.own`, from 128 characters on its head and its SHA-256: the middleware's rule.
    """
    if not adapter_salt or own in ("", adapter_salt):
        return adapter_salt or own
    whole = f"{adapter_salt}.{own}"
    if len(whole) < MAX_SALT or FORBIDDEN_IN_SALT & set(own):
        return whole
    return whole[:HEAD_CHARS] + sha256(whole.encode("utf-8", "surrogatepass")).hexdigest()


def salt_table(served_name: str, adapters: Iterable[Adapter]) -> bytes:
    """The file that the middleware reads (WARMFRONT_SALTS): the same bytes for the same adapters."""
    salts = {adapter.name: adapter.salt for adapter in sorted(adapters, key=lambda adapter: adapter.name)}
    return f"{json.dumps({'base': [served_name], 'salts': salts}, indent=2)}\n".encode()


def table_digest(table: bytes) -> str:
    """How an engine calls a table in its header `x-warmfront-salts`."""
    return sha256(table).hexdigest()[:12]
