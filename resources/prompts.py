"""Template files: reading them, each with every context it has.

The format is described in the README. What the renderings have in common is the domain's to find
(`warmers/prefixes.py`).
"""

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from posixpath import normpath
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from resources.objects import Objects, Stamp
from resources.placeholders import REVISION, Fillings
from warmers.changes import CANDIDATE, Entry, Listing
from warmers.errors import SourceUnavailable, StateUnavailable, TemplateError
from warmers.keys import check_salt
from warmers.prefixes import Failed, RenderOptions, Template

TEMPLATE_SUFFIXES = (".yaml", ".yml", ".json", ".txt", ".md")
READERS = 16
"""Files read at once; from S3, one after the other would take minutes for ten thousand."""
LOADER: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's where PyYAML has it: ten times as fast."""


class _Context(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    name: Annotated[str, Field(min_length=1)]
    file: str | None = None
    text: str | None = None
    documents: tuple[str | dict[str, str], ...] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> "_Context":
        if sum(value is not None for value in (self.file, self.text, self.documents)) != 1:
            raise ValueError("give exactly one of file, text, documents")
        return self


class _File(BaseModel):
    """The template format, as in the README."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: Annotated[str, Field(min_length=1)]
    messages: Annotated[tuple[dict[str, Any], ...], Field(min_length=1)]
    tools: tuple[dict[str, Any], ...] | None = None
    contexts: tuple[_Context, ...] = ()
    chat_template_kwargs: dict[str, Any] | None = None
    probes: dict[str, Any] = {}
    salt: str = ""
    adapter: str | None = None
    weight: Annotated[float, Field(gt=0)] = 1.0

    @field_validator("salt")
    @classmethod
    def _salt(cls, salt: str) -> str:
        return check_salt(salt)

    @field_validator("adapter")
    @classmethod
    def _not_yet(cls, adapter: str | None) -> str | None:
        if adapter is not None:
            raise ValueError("LoRA adapters cannot be warmed yet; under the base model's name their KV would be wrong")
        return adapter

    @field_validator("messages")
    @classmethod
    def _chat(cls, messages: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        for number, message in enumerate(messages, 1):
            if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
                raise ValueError(f"message {number} needs a role and a content, both text")
        return messages

    @model_validator(mode="after")
    def _contexts(self) -> "_File":
        names = [context.name for context in self.contexts]
        if len(set(names)) < len(names):
            raise ValueError("contexts: two of them have one name")
        return self


@dataclass(frozen=True, slots=True)
class Prompts:
    """What a source holds: templates, one for every context and one without, and what could not be read."""

    templates: tuple[Template, ...] = ()
    failed: tuple[Failed, ...] = ()

    @property
    def listing(self) -> Listing:
        """What it is compared by, from tick to tick."""
        lasting = (t for t in self.templates if t.turns_at is None)
        entries = {t.label: Entry(t.source, _digest([t.digest, t.salt, t.adapter, t.weight])[:16]) for t in lasting}
        return Listing(entries, {f.source: f.reason for f in self.failed})

    @property
    def digest(self) -> str:
        """Changes when any template changes, appears or disappears; 16 hex digits."""
        return self.listing.digest

    def by_label(self) -> dict[str, Template]:
        """Templates by `name` or `name/context`."""
        return {template.label: template for template in self.templates}


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Template files at the top of a directory or below an S3 prefix; folders in it may hold documents they name."""

    objects: Objects
    include: Sequence[str] = ("*",)

    def stamps(self) -> dict[str, Stamp]:
        """Every file, templates and documents. Raises SourceUnavailable."""
        with _source(self.objects):
            return self.objects.stamps()

    def read(self) -> Prompts:
        """Every template; a file that cannot be read is reported and harms no other. Raises SourceUnavailable."""
        files = self.stamps()
        paths = [path for path in sorted(files) if is_template(path, self.include)]
        with ThreadPoolExecutor(READERS, "templates") as pool:
            contents = dict(zip(paths, pool.map(partial(_read, self.objects), paths), strict=True))
        templates: list[Template] = []
        failed: list[Failed] = []
        seen: dict[str, str] = {}
        for path, content in contents.items():
            file = TemplateFile(path, content, self.objects, files)
            try:
                parsed = file.parse()
                if parsed.name in seen:
                    other = seen[parsed.name]
                    raise file.refused(f"its name {parsed.name!r} is that of {other}", "Give it another name.")
                templates += file.templates(parsed)
                seen[parsed.name] = path
            except TemplateError as error:
                failed.append(Failed(path, str(error), path))
        return Prompts(tuple(templates), tuple(failed))


def is_template(path: str, include: Sequence[str]) -> bool:
    """Whether a file is a template of the fleet: at the top, of a known kind, by a name that it includes."""
    return "/" not in path and path.endswith(TEMPLATE_SUFFIXES) and any(fnmatchcase(path, name) for name in include)


@dataclass(frozen=True, slots=True)
class TemplateFile:
    """One file of a source, with what it may name beside it."""

    path: str
    content: bytes | StateUnavailable | None
    """None: it went away."""
    objects: Objects
    files: Container[str]

    def parse(self) -> _File:
        """Raises TemplateError naming file and field."""
        text = self._decoded(self.content, self.path)
        stem, _, suffix = self.path.rpartition(".")
        if not text.strip():
            raise self.refused("it is empty", "Write a template into it, or remove it.")
        if suffix in ("txt", "md"):
            # One expression that yields the text, so that braces in it stay text.
            system = {"role": "system", "content": "{{ " + json.dumps(text) + " }}"}
            return _File(name=stem, messages=(system,))
        try:
            raw = json.loads(text) if suffix == "json" else yaml.load(text, LOADER)  # noqa: S506 - one of the two safe ones
        except (ValueError, yaml.YAMLError, RecursionError) as error:
            raise self.refused(" ".join(str(error).split()), "Correct its syntax.") from None
        if not isinstance(raw, dict):
            raise self.refused("it is no mapping", "It needs name and messages at least.")
        candidate = CANDIDATE if stem.endswith(CANDIDATE) else ""
        try:
            parsed = _File.model_validate({"name": stem.removesuffix(CANDIDATE)} | raw)
        except ValidationError as error:
            fields = ((".".join(map(str, e["loc"])), e["msg"].removeprefix("Value error, ")) for e in error.errors())
            raise self.refused("; ".join(f"{f}: {m}" if f else m for f, m in fields), "Correct the field.") from None
        return parsed.model_copy(update={"name": parsed.name + candidate})

    def templates(self, parsed: _File) -> list[Template]:
        """The template without a context of its own, then one for each context."""
        contexts = [(None, ""), *((context.name, self._context(context)) for context in parsed.contexts)]
        return [self._template(parsed, name, text) for name, text in contexts]

    def refused(self, seen: str, do: str) -> TemplateError:
        """The error for this file."""
        return TemplateError(f"reading template {self.path}", seen=seen, do=do)

    def _template(self, parsed: _File, context: str | None, text: str) -> Template:
        messages = _with_question(parsed.messages)
        fixed = {} if context is None else {"context": text}
        renderings = Fillings(messages, parsed.probes, fixed)
        try:
            renderings[0]
        except ValueError as error:
            raise self.refused(str(error), "Correct it.") from None
        except TemplateError as error:
            raise self.refused(f"{error.attempted}: {error.seen}", error.do) from None
        shaping = [REVISION, messages, parsed.probes, fixed]
        options = RenderOptions(parsed.tools, parsed.chat_template_kwargs)
        return Template(
            name=parsed.name,
            context=context,
            digest=_digest([*shaping, options.tools, options.chat_template_kwargs]),
            renderings=renderings,
            options=options,
            salt=parsed.salt,
            adapter=parsed.adapter,
            weight=parsed.weight,
            source=self.path,
        )

    def _context(self, context: _Context) -> str:
        if context.text is not None:
            return context.text
        if context.file is not None:
            return self._document(context.file)
        return "\n\n".join(self._document(document) for document in context.documents or ())

    def _document(self, document: str | Mapping[str, str]) -> str:
        """A document is a file name, `{file: ...}` or `{text: ...}`."""
        if isinstance(document, str):
            path = normpath(document)
            if path not in self.files:
                raise self.refused(f"there is no file {document} below its directory", "Correct the name.")
            return self._decoded(_read(self.objects, path), path)
        if set(document) == {"text"}:
            return document["text"]
        if set(document) == {"file"}:
            return self._document(document["file"])
        raise self.refused(f"contexts: a document with {sorted(document)}", "Give a file name, {file: …} or {text: …}.")

    def _decoded(self, content: bytes | StateUnavailable | None, path: str) -> str:
        if isinstance(content, StateUnavailable):
            raise self.refused(f"{path}: {content.seen}", "Make it readable.")
        if content is None:
            raise self.refused(f"{path} went away while it was read", "Put it back, or correct the name.")
        try:
            return content.decode().replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            raise self.refused(f"{path} is not UTF-8 ({error.reason} at byte {error.start})", "Save it so.") from None


def _with_question(messages: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """A conversation ends with a user; where the template stops before, somebody's question follows."""
    if messages[-1]["role"] == "user":
        return tuple(messages)
    return (*messages, {"role": "user", "content": "{{ question }}"})


def _digest(shaping: Sequence[Any]) -> str:
    from blake3 import blake3

    return blake3(json.dumps(shaping, ensure_ascii=False, default=str).encode()).hexdigest()


def _read(objects: Objects, path: str) -> bytes | StateUnavailable | None:
    """A file's content; what kept one file from being read is that file's trouble alone."""
    try:
        found = objects.read(path)
    except StateUnavailable as error:
        return error
    return found[0] if found else None


@contextmanager
def _source(objects: Objects) -> Iterator[None]:
    try:
        yield
    except StateUnavailable as error:
        raise SourceUnavailable(
            f"listing the templates in {objects}", seen=error.seen, do="Correct prompts.directory, or its access."
        ) from error
