"""Why a request did not hit: where it leaves the prefix that was warmed, which chunks L2 has, and what to do.

Reading a captured request belongs in `resources/requests.py`, printing in `pipelines/printing.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from warmers.divergence import Captured, Divergence, first_divergence, likeness
from warmers.errors import EngineMismatch
from warmers.fleet import Fleet
from warmers.identity import DaemonIdentity, EngineIdentity, require_match
from warmers.keys import KeyLayout, chunk_keys
from warmers.ledger import Rows
from warmers.prefixes import Prefix, common_start
from warmers.presence import KVStore, look
from warmers.salts import Adapter, combined
from warmers.templates import Template

State = Literal["present", "missing", "expired", "wrong size"]
"""Expired: missing, and the ledger has it warmed a TTL ago or longer."""

ALIKE = 0.5
"""Share of a prefix, by tokens or by text, that a request has to have to be taken for one of its template's."""

SEEN: Mapping[State, str] = {
    "missing": "is missing in L2",
    "expired": "has expired in L2",
    "wrong size": "has a wrong size in L2",
}


@dataclass(frozen=True, slots=True)
class ChunkState:
    """One chunk's key for one rank, as the request looks it up."""

    chunk: int
    rank: int
    key: str
    state: State
    warmed_at: float | None
    """By the ledger, in seconds since the epoch; None: never."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason, and what would change it."""

    what: str
    do: str
    texts: tuple[str, str] | None = None
    """As it was warmed, and as the request has it."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything there is to say of one request."""

    label: str | None
    """The template, and context, that it is nearest to; None: none is near."""
    prompt_tokens: int | None
    prefix_tokens: int
    common_tokens: int | None
    """Tokens that it starts with as the prefix does; None: not known without an engine."""
    hit_tokens: int | None
    """What it hits in L2 now, as it was sent."""
    full_tokens: int
    """What it hits when nothing stands in the way: the prefix's full chunks."""
    divergence: Divergence | None
    chunks: tuple[ChunkState, ...]
    findings: tuple[Finding, ...]


def explain(
    request: Captured,
    prefixes: Sequence[Prefix],
    templates: Mapping[str, Template],
    fleet: Fleet,
    store: KVStore,
    ledger: Rows,
    now: float,
    running: tuple[EngineIdentity, DaemonIdentity] | None = None,
) -> Explanation:
    """Compare the request with the prefix that it is nearest to, and with what L2 holds of that.

    `running`: engine and daemon, where a replica runs. Raises StoreUnavailable.
    """
    wrong = [*_wrong_model(request, fleet), *(_wrong_identity(fleet, *running) if running else ())]
    prefix = _nearest(request, prefixes, templates, fleet)
    if prefix is None:
        nothing = _nothing_near(request, prefixes, templates)
        return Explanation(None, _count(request), 0, 0, 0, 0, None, (), (*wrong, nothing))
    common = None if request.ids is None else common_start([request.ids, prefix.ids])
    divergence = None
    if common is None or common < prefix.full_tokens:  # what is behind the last full chunk is computed anyway
        divergence = first_divergence(request, prefix, templates.get(prefix.label), common)
    adapter = fleet.adapter(request.model)
    salt = combined(adapter.salt if adapter else "", request.salt)
    chunks = _chunks(prefix, salt, fleet, store, ledger, now)
    hits = None if common is None else 0 if wrong else _hit_tokens(chunks, common, fleet)
    leaves = [_leaves(divergence, prefix, common, now)] if divergence else []
    gaps = list(_incomplete(chunks, fleet, now)) if salt == prefix.key_salt else []
    # Whichever of the two ends the hit comes first.
    ends = [*leaves, *gaps] if common is None or _whole(chunks, fleet) > common else [*gaps, *leaves]
    return Explanation(
        label=prefix.label,
        prompt_tokens=_count(request),
        prefix_tokens=prefix.shared,
        common_tokens=common,
        hit_tokens=hits,
        full_tokens=prefix.full_tokens,
        divergence=divergence,
        chunks=chunks,
        findings=(*wrong, *_other_salt(request, adapter, prefix), *ends, *_never_shared(prefix)),
    )


def _count(request: Captured) -> int | None:
    return None if request.ids is None else len(request.ids)


def _nearest(
    request: Captured, prefixes: Sequence[Prefix], templates: Mapping[str, Template], fleet: Fleet
) -> Prefix | None:
    """The prefix that the request follows longest, by tokens where they are known, or else is most like by its text."""
    near = []
    for prefix in prefixes:
        common = _follows(request, prefix)
        if common >= min(prefix.chunk_tokens, ALIKE * prefix.shared) and common:
            near.append((common, prefix))
    if not any(common == prefix.shared and prefix.chunks for common, prefix in near):
        for prefix in prefixes:
            template = templates.get(prefix.label)
            start, lines = likeness(request, template) if template else (0.0, 0.0)
            if max(start, lines) >= ALIKE:
                near.append((round(prefix.shared * max(start, lines / 3)), prefix))
    adapter = fleet.adapter(request.model)
    asked = (adapter.name if adapter else None, request.salt)
    ranked = [(common, (p.adapter, p.salt) == asked, common - p.shared, p) for common, p in near]
    return max(ranked, key=lambda one: one[:3])[3] if ranked else None


def _follows(request: Captured, prefix: Prefix) -> int:
    return 0 if request.ids is None else common_start([request.ids, prefix.ids])


def _wrong_model(request: Captured, fleet: Fleet) -> Iterator[Finding]:
    if request.model and request.model != fleet.model.served_name and fleet.adapter(request.model) is None:
        yield Finding(
            f"it asks for model {request.model!r}, and fleet {fleet.name!r} serves {fleet.model.served_name!r}: "
            "models share no KV",
            f'Send "model": "{fleet.model.served_name}", or look at the fleet that serves {request.model!r} (--fleet).',
        )


def _wrong_identity(fleet: Fleet, engine: EngineIdentity, daemon: DaemonIdentity) -> Iterator[Finding]:
    try:
        require_match(fleet, engine, daemon)
    except EngineMismatch as error:
        yield Finding(
            f"the running replica is not of this fleet: {error.seen}",
            "Start this fleet's own engine and daemon, or correct the fleet in warmfront.yaml.",
        )


def _leaves(divergence: Divergence, prefix: Prefix, common: int | None, now: float) -> Finding:
    token = "" if common is None else f"token {common:,} of {prefix.shared:,}"
    place = divergence.where if divergence.where == f"token {common}" else f"{divergence.where}{token and f', {token}'}"
    do = divergence.do
    if prefix.turns_at is not None and prefix.turns_at <= now:
        do = "The date that was warmed has passed. Run warmfront warm, and keep the sensors or a schedule running."
    return Finding(f"it leaves the warmed prefix at {place}", do, (divergence.warmed, divergence.request))


def _nothing_near(request: Captured, prefixes: Sequence[Prefix], templates: Mapping[str, Template]) -> Finding:
    if request.ids is None and request.messages is None:
        return Finding(
            "its prompt is text, and only an engine can tell its tokens",
            "Start one (warmfront up) and ask again.",
        )
    new = [templates[label] for label in templates.keys() - {prefix.label for prefix in prefixes}]
    start, label = max(((likeness(request, template)[0], template.label) for template in new), default=(0.0, ""))
    if start >= ALIKE:
        return Finding(f"it is of template {label!r}, which has not been warmed", "Run warmfront warm.")
    if not prefixes:
        return Finding("nothing has been warmed for this fleet yet", "Run warmfront warm.")
    return Finding(
        f"it starts like none of the {len(prefixes)} templates and contexts that were warmed",
        "Add a template for it, then warm; or correct what the client sends.",
    )


def _other_salt(request: Captured, adapter: Adapter | None, prefix: Prefix) -> Iterator[Finding]:
    asked = adapter.name if adapter else None
    if asked != prefix.adapter:
        asks, was = (f"the adapter {name!r}" if name else "the base model" for name in (asked, prefix.adapter))
        yield Finding(
            f"it asks for {asks}, and the prefix was warmed for {was}: the two share no KV",
            "Write a template for it too, with `adapter` as its requests ask, or correct the request's model.",
        )
    if request.salt != prefix.salt:
        says, was = (f"cache_salt {salt!r}" if salt else "no cache_salt" for salt in (request.salt, prefix.salt))
        yield Finding(
            f"it carries {says}, and the prefix was warmed with {was}: the salt is in every KV key",
            "Give the template the salt that its requests carry, or have them send the template's.",
        )


def _chunks(
    prefix: Prefix, salt: str, fleet: Fleet, store: KVStore, ledger: Rows, now: float
) -> tuple[ChunkState, ...]:
    """Every chunk of the prefix under the request's salt, on every rank."""
    table = chunk_keys(prefix.ids, KeyLayout.of(fleet), salt)
    names, ranks = list(table), fleet.engine.tensor_parallel
    if not names:
        return ()
    presence = look(store, names, ranks, fleet.chunk_bytes)
    warmed = dict(zip(ledger.chunk_ids(), ledger.warmed_at.tolist(), strict=True))
    digests = [row.tobytes() for row in table.hashes]
    chunks = []
    for number, (name, size) in enumerate(zip(names, presence.sizes.reshape(-1).tolist(), strict=True)):
        chunk, rank = divmod(number, ranks)
        at = warmed.get((salt, digests[chunk])) or None
        chunks.append(ChunkState(chunk, rank, name, _state(size, at, fleet, now), at))
    return tuple(chunks)


def _state(size: int, warmed_at: float | None, fleet: Fleet, now: float) -> State:
    if size >= 0:
        return "present" if size == fleet.chunk_bytes else "wrong size"
    expires = warmed_at is not None and fleet.ttl_s is not None and now - warmed_at >= fleet.ttl_s
    return "expired" if expires else "missing"


def _whole(chunks: Sequence[ChunkState], fleet: Fleet) -> int:
    """Tokens in leading chunks that are whole on every rank."""
    broken = min((c.chunk for c in chunks if c.state != "present"), default=len(chunks) // fleet.engine.tensor_parallel)
    return broken * fleet.engine.chunk_tokens


def _hit_tokens(chunks: Sequence[ChunkState], common: int, fleet: Fleet) -> int:
    """What is whole, within what the request has in common with the prefix."""
    return min(_whole(chunks, fleet), common // fleet.engine.chunk_tokens * fleet.engine.chunk_tokens)


def _incomplete(chunks: Sequence[ChunkState], fleet: Fleet, now: float) -> Iterator[Finding]:
    ranks = fleet.engine.tensor_parallel
    for number in sorted({c.chunk for c in chunks if c.state != "present"})[:1]:
        mine = [c for c in chunks if c.chunk == number]
        bad = [c for c in mine if c.state != "present"]
        on = "" if len(bad) == ranks else f" on rank {', '.join(str(c.rank) for c in bad)} of {ranks}"
        yield Finding(f"chunk {number} {SEEN[bad[0].state]}{on}; {_past(bad[0], fleet, now)}", _remedy(bad[0]))


def _past(chunk: ChunkState, fleet: Fleet, now: float) -> str:
    if chunk.warmed_at is None:
        return "the ledger has never seen it warmed"
    at = datetime.fromtimestamp(chunk.warmed_at, UTC)
    age = (now - chunk.warmed_at) / 3600
    ttl = "no TTL" if fleet.ttl_s is None else f"a TTL of {fleet.ttl_s / 3600:.1f} h"
    return f"it was warmed at {at:%Y-%m-%d %H:%M} UTC, {age:,.1f} h ago, with {ttl}"


def _remedy(chunk: ChunkState) -> str:
    if chunk.state == "wrong size":
        return "Run warmfront warm: it is deleted and computed anew."
    if chunk.warmed_at is None:
        return "Run warmfront warm."
    if chunk.state == "expired":
        return "Run warmfront warm; raise l2.ttl_s, or warm more often than it lasts."
    return "It was evicted or deleted before its time. Run warmfront warm; then look at L2's memory and evictions."


def _never_shared(prefix: Prefix) -> Iterator[Finding]:
    if prefix.short_by:
        yield Finding(
            f"the template shares {prefix.shared} tokens, {prefix.short_by} short of one chunk: it can never hit",
            "Lengthen what its requests share, or leave it: it is cheap to compute.",
        )
    for variation in prefix.unstable:
        yield Finding(
            f"its shared part ends early, at {variation}",
            "Move what varies behind what does not, in template and client.",
        )
