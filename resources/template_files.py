"""One template file: from its bytes, and those of documents that it names, to templates.

The format is described in the README. Finding and reading files belongs in `resources/prompts.py`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from posixpath import normpath
from typing import Annotated, Any, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from resources.clocks import NOW
from resources.placeholders import REVISION, Fillings
from warmers.changes import CANDIDATE
from warmers.errors import TemplateError
from warmers.salts import check_salt
from warmers.templates import RenderOptions, Template

LOADER: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's where PyYAML has it: ten times as fast."""

Document = str | dict[str, str]
"""A file name, `{file: ...}` or `{text: ...}`."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """What there is instead of a file's bytes."""

    reason: str
    do: str


class Part(NamedTuple):
    """One document of a context."""

    path: str | None
    """Below the source's root; None: it is given as text."""
    text: str = ""


class _Context(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    name: Annotated[str, Field(min_length=1)]
    file: str | None = None
    text: str | None = None
    documents: tuple[Document, ...] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> "_Context":
        if sum(value is not None for value in (self.file, self.text, self.documents)) != 1:
            raise ValueError("give exactly one of file, text, documents")
        return self

    @field_validator("documents")
    @classmethod
    def _each(cls, documents: tuple[Document, ...] | None) -> tuple[Document, ...] | None:
        for document in documents or ():
            if not isinstance(document, str) and set(document) not in ({"file"}, {"text"}):
                raise ValueError(f"a document with {sorted(document)}: give a file name, {{file: …}} or {{text: …}}")
        return documents

    @property
    def parts(self) -> tuple["Part", ...]:
        """What it is put together from, however that was given."""
        if self.text is not None:
            return (Part(None, self.text),)
        return tuple(map(_part, self.documents or (self.file or "",)))


class ParsedTemplate(BaseModel):
    """The template format, as in the README."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: Annotated[str, Field(min_length=1)]
    messages: Annotated[tuple[dict[str, Any], ...], Field(min_length=1)]
    tools: tuple[dict[str, Any], ...] | None = None
    contexts: tuple[_Context, ...] = ()
    chat_template_kwargs: dict[str, Any] | None = None
    probes: dict[str, Any] = {}
    salt: str = ""
    adapter: Annotated[str, Field(min_length=1)] | None = None
    weight: Annotated[float, Field(gt=0)] = 1.0

    @field_validator("name")
    @classmethod
    def _plain(cls, name: str) -> str:
        if "/" in name or name.endswith((CANDIDATE, NOW)):
            raise ValueError(f"{name!r} has a / in it, or ends in {CANDIDATE} or {NOW}, which mean something in labels")
        return name

    @field_validator("salt")
    @classmethod
    def _salt(cls, salt: str) -> str:
        return check_salt(salt)

    @field_validator("messages")
    @classmethod
    def _chat(cls, messages: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        for number, message in enumerate(messages, 1):
            if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
                raise ValueError(f"message {number} needs a role and a content, both text")
        return messages

    @field_validator("messages", "tools", "chat_template_kwargs")
    @classmethod
    def _json(cls, value: Any) -> Any:
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"not what JSON can say ({error}); a date needs quotes") from None
        return value

    @model_validator(mode="after")
    def _contexts(self) -> "ParsedTemplate":
        names = [context.name for context in self.contexts]
        if len(set(names)) < len(names):
            raise ValueError("contexts: two of them have one name")
        return self

    @property
    def documents(self) -> tuple[str, ...]:
        """Paths of the files that its contexts name."""
        parts = (part for context in self.contexts for part in context.parts)
        return tuple(sorted({part.path for part in parts if part.path is not None}))


@dataclass(frozen=True, slots=True)
class TemplateFile:
    """One file of a source."""

    path: str
    content: bytes | Unreadable

    def parse(self) -> ParsedTemplate:
        """Raises TemplateError naming file and field."""
        text = self._decoded(self.content, self.path)
        stem, _, suffix = self.path.rpartition(".")
        if not text.strip():
            raise self.refused("it is empty", "Write a template into it, or remove it.")
        candidate = CANDIDATE if stem.endswith(CANDIDATE) else ""
        fields = {"name": stem.removesuffix(CANDIDATE)} | self._fields(text, suffix)
        try:
            parsed = ParsedTemplate.model_validate(fields)
        except ValidationError as error:
            wrong = ((".".join(map(str, e["loc"])), e["msg"].removeprefix("Value error, ")) for e in error.errors())
            raise self.refused("; ".join(f"{f}: {m}" if f else m for f, m in wrong), "Correct the field.") from None
        return parsed.model_copy(update={"name": parsed.name + candidate})

    def templates(self, parsed: ParsedTemplate, documents: Mapping[str, bytes | Unreadable]) -> list[Template]:
        """The template without a context of its own, then one for each context. Raises TemplateError."""
        contexts = [(None, ""), *((context.name, self._text(context.parts, documents)) for context in parsed.contexts)]
        return [self._template(parsed, name, text) for name, text in contexts]

    def refused(self, seen: str, do: str) -> TemplateError:
        """The error for this file."""
        return TemplateError(f"reading template {self.path}", seen=seen, do=do)

    def _fields(self, text: str, suffix: str) -> dict[str, Any]:
        if suffix in ("txt", "md"):
            # One expression that yields the text, so that braces in it stay text.
            return {"messages": ({"role": "system", "content": "{{ " + json.dumps(text) + " }}"},)}
        try:
            raw = json.loads(text) if suffix == "json" else yaml.load(text, LOADER)  # noqa: S506 - one of the two safe ones
        except (ValueError, yaml.YAMLError, RecursionError) as error:
            raise self.refused(" ".join(str(error).split()), "Correct its syntax.") from None
        if not isinstance(raw, dict):
            raise self.refused("it is no mapping", "It needs name and messages at least.")
        return raw

    def _template(self, parsed: ParsedTemplate, context: str | None, text: str) -> Template:
        messages = _with_question(parsed.messages)
        fixed = {} if context is None else {"context": text}
        renderings = Fillings(messages, parsed.probes, fixed)
        try:
            renderings[0]
        except TemplateError as error:
            raise self.refused(f"{error.attempted}: {error.seen}", error.do) from None
        options = RenderOptions(parsed.tools, parsed.chat_template_kwargs)
        return Template(
            name=parsed.name,
            context=context,
            digest=digest_of([REVISION, messages, parsed.probes, fixed, options.tools, options.chat_template_kwargs]),
            renderings=renderings,
            options=options,
            salt=parsed.salt,
            adapter=parsed.adapter,
            weight=parsed.weight,
            source=self.path,
        )

    def _text(self, parts: Sequence[Part], documents: Mapping[str, bytes | Unreadable]) -> str:
        return "\n\n".join(p.text if p.path is None else self._document(p.path, documents) for p in parts)

    def _document(self, path: str, documents: Mapping[str, bytes | Unreadable]) -> str:
        if path not in documents:
            raise self.refused(f"there is no file {path} below its directory", "Correct the name.")
        return self._decoded(documents[path], path)

    def _decoded(self, content: bytes | Unreadable, path: str) -> str:
        if isinstance(content, Unreadable):
            raise self.refused(f"{path} {content.reason}", content.do)
        try:
            return content.decode().replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            raise self.refused(f"{path} is not UTF-8 ({error.reason} at byte {error.start})", "Save it so.") from None


def digest_of(shaping: Sequence[Any]) -> str:
    """Of everything that shapes a template's renderings; probes may be what only YAML can say."""
    from blake3 import blake3

    return blake3(json.dumps(shaping, ensure_ascii=False, default=str).encode()).hexdigest()


def _part(document: Document) -> Part:
    if isinstance(document, str):
        return Part(normpath(document))
    return Part(None, document["text"]) if "text" in document else Part(normpath(document["file"]))


def _with_question(messages: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """A conversation ends with a user; where the template stops before, somebody's question follows."""
    if messages[-1]["role"] == "user":
        return tuple(messages)
    return (*messages, {"role": "user", "content": "{{ question }}"})
