"""What a template's requests have in common, as token ids that the engine itself rendered.

A prefix is the common start of several renderings of one template: with user texts that begin
differently, two clock times and two request ids.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from warmers.errors import PermanentError, TemplateError
from warmers.identity import EngineIdentity
from warmers.keys import TokenIds
from warmers.salts import Adapter, combined
from warmers.templates import Failed, Messages, RenderOptions, Template
from warmers.variations import Variation, first_difference, varying_lines

ROOM_TOKENS = 32
"""What a question and an answer take in the model's context at the least."""
LOST_CHARS = 200
"""Unchanging text behind a variation, about fifty tokens, from which on it is worth a warning."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What one prefill cost: tokens in the prompt, and how many of them came from a cache."""

    prompt_tokens: int
    cached_tokens: int


class Engine(Protocol):
    """A vLLM server, as far as warming needs it."""

    def render(self, messages: Messages, options: RenderOptions) -> TokenIds:
        """Token ids of a chat request, by the engine's own chat template."""

    def render_for_chat(self, messages: Messages, options: RenderOptions) -> TokenIds | None:
        """The same by the chat endpoint's own path; None where the engine does not offer it."""

    def tokenize(self, text: str, *, special_tokens: bool = False) -> TokenIds:
        """Token ids of a text as it stands; with special tokens, as a completion request gets them."""

    def prefill(self, ids: TokenIds, salt: str | None, adapter: str | None = None) -> Usage:
        """Compute the KV of `ids`, by a request for one token; under a LoRA adapter where one is named."""

    def identity(self) -> EngineIdentity:
        """What the engine says of itself."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Token ids that every request of a template starts with; shorter than one chunk, they can never hit."""

    template: str
    context: str | None
    digest: str
    """Of the template's content, its context, the tokenizer and the chat template."""
    rendered: TokenIds
    """One whole rendering; its first `shared` tokens are the prefix, what follows is one user's."""
    shared: int
    chunk_tokens: int
    salt: str = ""
    """The cache_salt that its requests carry."""
    adapter: str | None = None
    """The LoRA adapter that they ask for; None: the base model."""
    adapter_salt: str = ""
    """That adapter's, which the engine's middleware puts before theirs; see `PrefixSet.under`."""
    weight: float = 1.0
    variations: tuple[Variation, ...] = ()
    source: str = ""
    turns_at: float | None = None
    """When its clock turns and no request starts with it any more, in seconds since the epoch; None: never."""

    @property
    def label(self) -> str:
        """`template` or `template/context`."""
        return self.template if self.context is None else f"{self.template}/{self.context}"

    @property
    def key_salt(self) -> str:
        """The salt in its keys."""
        return combined(self.adapter_salt, self.salt)

    @property
    def ids(self) -> TokenIds:
        """The shared tokens."""
        return self.rendered[: self.shared]

    @property
    def chunks(self) -> int:
        """Full chunks: what can be stored and hit."""
        return self.shared // self.chunk_tokens

    @property
    def full_tokens(self) -> int:
        """Tokens in full chunks."""
        return self.chunks * self.chunk_tokens

    @property
    def tail_tokens(self) -> int:
        """Shared tokens behind the last full chunk, which every request computes again."""
        return self.shared - self.full_tokens

    @property
    def short_by(self) -> int:
        """Tokens that are missing to one chunk; 0 where the prefix can hit."""
        return max(0, self.chunk_tokens - self.shared)

    @property
    def unstable(self) -> tuple[Variation, ...]:
        """Variations that cost reuse: much of what stands behind them is the same for all."""
        return tuple(v for v in self.variations if v.lost_chars >= LOST_CHARS)


@dataclass(frozen=True, slots=True)
class PrefixSet:
    """What became of every template of a fleet."""

    found: tuple[Prefix, ...] = ()
    failed: tuple[Failed, ...] = ()

    @property
    def prefixes(self) -> tuple[Prefix, ...]:
        """Those that can hit: at least one full chunk."""
        return tuple(p for p in self.found if p.chunks)

    def under(self, adapters: Iterable[Adapter]) -> "PrefixSet":
        """With the salts that adapters have now, without prefixes of those that are gone. Nothing else sets them."""
        salts = {adapter.name: adapter.salt for adapter in adapters}
        kept = (p for p in self.found if p.adapter is None or p.adapter in salts)
        return replace(self, found=tuple(replace(p, adapter_salt=salts.get(p.adapter or "", "")) for p in kept))

    @property
    def turns_at(self) -> float | None:
        """When the first of their clocks turns, in seconds since the epoch; None: none has one."""
        return min((p.turns_at for p in self.found if p.turns_at is not None), default=None)

    @property
    def too_short(self) -> tuple[Prefix, ...]:
        """Those that cannot."""
        return tuple(p for p in self.found if not p.chunks)


ClockTexts = Callable[[Messages, RenderOptions], tuple[str, str] | None]
"""A rendering by the chat template at two clock times, or None where it reads no clock. The engine's own
clock cannot be moved from outside, so this one rendering is made here."""


def common_start(sequences: Sequence[TokenIds]) -> int:
    """How many leading tokens all sequences share."""
    shortest = min(len(s) for s in sequences)
    first = sequences[0][:shortest]
    for other in sequences[1:]:
        unequal = np.flatnonzero(first != other[: len(first)])
        if len(unequal):
            first = first[: unequal[0]]
    return len(first)


def find_prefix(
    template: Template, engine: Engine, *, chunk_tokens: int, digest: str, clock_texts: ClockTexts | None = None
) -> Prefix:
    """Render `template` with every probe and keep the common start.

    Raises TemplateError when the engine refuses to render it, or a request would not fit its context.
    """
    distinct = list({repr(messages): messages for messages in template.renderings}.values())
    rendered = [engine.render(messages, template.options) for messages in distinct]
    variations = list(varying_lines(distinct))
    starts = list(rendered)
    texts = clock_texts(distinct[0], template.options) if clock_texts and template.turns_at is None else None
    if texts is not None:
        local = [engine.tokenize(text) for text in texts]
        if common_start([rendered[0], local[0]]) < common_start(local):
            raise TemplateError(
                f"finding where the chat template reads the clock, for {template.label!r}",
                seen="rendered here, a request has other token ids than the engine gives it, before any clock",
                do="Correct the model directory (special tokens, chat template), or take the clock out of it.",
            )
        starts += local
        line, values = first_difference(*texts)
        lost = sum(len(str(message.get("content") or "")) for message in distinct[0][:-1])
        variations.insert(0, Variation(f"the chat template's clock, rendered line {line}", values, lost))
    return Prefix(
        template=template.name,
        context=template.context,
        digest=digest,
        rendered=max(rendered, key=len),
        shared=common_start(starts),
        chunk_tokens=chunk_tokens,
        salt=template.salt,
        adapter=template.adapter,
        weight=template.weight,
        variations=tuple(variations),
        source=template.source,
        turns_at=template.turns_at,
    )


def relabel(prefix: Prefix, template: Template) -> Prefix:
    """A cached prefix under the name, salt and weight that its template has now."""
    return replace(
        prefix,
        template=template.name,
        context=template.context,
        salt=template.salt,
        adapter=template.adapter,
        weight=template.weight,
        source=template.source,
        turns_at=template.turns_at,
    )


def find_prefixes(
    templates: Iterable[Template],
    engine: Engine,
    *,
    chunk_tokens: int,
    max_model_len: int,
    digest_of: Callable[[Template], str],
    last: PrefixSet,
    clock_texts: ClockTexts | None = None,
    failed: Iterable[Failed] = (),
) -> PrefixSet:
    """The prefixes of all templates; a template that fails is reported, with those that `failed` before.

    What did not change since `last` is not rendered again, and what is broken now keeps the prefix it had.
    """
    by_digest = {prefix.digest: prefix for prefix in last.found}
    found: list[Prefix] = []
    broken = list(failed)
    for template in templates:
        digest = digest_of(template)
        try:
            known = by_digest.get(digest)
            prefix = (
                relabel(known, template)
                if known
                else find_prefix(template, engine, chunk_tokens=chunk_tokens, digest=digest, clock_texts=clock_texts)
            )
            _require_fit(prefix, max_model_len)
        except PermanentError as error:
            broken.append(Failed(template.label, str(error), template.source))
            continue
        found.append(prefix)
    return PrefixSet((*found, *_kept(last, found, broken)), tuple(broken))


def _kept(last: PrefixSet, found: Iterable[Prefix], broken: Iterable[Failed]) -> tuple[Prefix, ...]:
    """Prefixes of the last good version of what is broken: its users still have that one."""
    sources, there = {failed.source for failed in broken if failed.source}, {prefix.label for prefix in found}
    return tuple(p for p in last.found if p.source in sources and p.label not in there and p.turns_at is None)


def _require_fit(prefix: Prefix, max_model_len: int) -> None:
    if len(prefix.rendered) + ROOM_TOKENS > max_model_len:
        raise TemplateError(
            f"rendering template {prefix.label!r}",
            seen=f"{len(prefix.rendered):,} tokens leave no room for an answer: the model's context is "
            f"{max_model_len:,}",
            do="Shorten the template or its context.",
        )


def mismatches(
    prefixes: Iterable[Prefix], templates: Mapping[str, Template], engine: Engine, limit: int = 32
) -> tuple[str, ...]:
    """Labels of prefixes that the engine renders otherwise now, on any of its paths; at most `limit` are asked.

    Cached prefixes were rendered earlier, perhaps by another tokenizer than the engine has today.
    """
    wrong = []
    for prefix in [p for p in prefixes if p.label in templates][:limit]:
        template = templates[prefix.label]
        for render in (engine.render, engine.render_for_chat):
            ids = render(template.renderings[0], template.options)
            if ids is not None and not np.array_equal(ids[: prefix.shared], prefix.ids):
                wrong.append(prefix.label)
                break
    return tuple(wrong)
