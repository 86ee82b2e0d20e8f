"""Template files: reading them, each with every context it has.

The format is described in the README. What the renderings have in common is the domain's to find
(`warmers/prefixes.py`).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from resources.config import template_files
from resources.placeholders import fill
from warmers.errors import TemplateError
from warmers.keys import check_salt
from warmers.prefixes import Failed, RenderOptions, Template


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
    def digest(self) -> str:
        """Changes when any template changes, appears or disappears; 64 hex digits."""
        from blake3 import blake3

        parts = sorted((t.label, t.digest, t.salt, t.adapter, t.weight) for t in self.templates)
        broken = sorted((f.template, f.reason) for f in self.failed)
        return blake3(json.dumps([parts, broken]).encode()).hexdigest()

    def by_label(self) -> dict[str, Template]:
        """Templates by `name` or `name/context`."""
        return {template.label: template for template in self.templates}


@dataclass(frozen=True, slots=True)
class DirectoryPrompts:
    """The template files at the top of a directory; folders in it may hold the documents they name."""

    directory: Path
    include: Sequence[str] = ("*",)

    def read(self) -> Prompts:
        """Every template; a file that cannot be read is reported and harms no other."""
        templates: list[Template] = []
        failed: list[Failed] = []
        seen: dict[str, Path] = {}
        for path in template_files(self.directory, self.include):
            try:
                content = read_template(path)
                if content.name in seen:
                    other = seen[content.name].name
                    raise _refused(path, f"its name {content.name!r} is that of {other}", "Give it another name.")
                templates += list(expand(content, path))
                seen[content.name] = path
            except TemplateError as error:
                failed.append(Failed(path.name, str(error)))
        return Prompts(tuple(templates), tuple(failed))


def read_template(path: Path) -> _File:
    """Parse one file. Raises TemplateError naming file and field."""
    text = _text(path, path)
    if not text.strip():
        raise _refused(path, "it is empty", "Write a template into it, or remove it.")
    if path.suffix in (".txt", ".md"):
        # One expression that yields the text, so that braces in it stay text.
        system = {"role": "system", "content": "{{ " + json.dumps(text) + " }}"}
        return _File(name=path.stem, messages=(system,))
    try:
        raw = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise _refused(path, " ".join(str(error).split()), "Correct its syntax.") from None
    if not isinstance(raw, dict):
        raise _refused(path, "it is no mapping", "It needs name and messages at least.")
    try:
        return _File.model_validate({"name": path.stem} | raw)
    except ValidationError as error:
        fields = ((".".join(map(str, e["loc"])), e["msg"].removeprefix("Value error, ")) for e in error.errors())
        raise _refused(path, "; ".join(f"{f}: {m}" if f else m for f, m in fields), "Correct the field.") from None


def expand(content: _File, path: Path) -> Iterable[Template]:
    """The template without a context of its own, then one for each context."""
    yield _template(content, path, None, "")
    for context in content.contexts:
        yield _template(content, path, context.name, _context_text(context, path))


def _template(content: _File, path: Path, context: str | None, text: str) -> Template:
    messages = _with_question(content.messages)
    try:
        renderings = fill(messages, content.probes, {} if context is None else {"context": text})
    except ValueError as error:
        raise _refused(path, str(error), "Correct it.") from None
    options = RenderOptions(content.tools, content.chat_template_kwargs)
    return Template(
        name=content.name,
        context=context,
        digest=_digest(renderings, options),
        renderings=renderings,
        options=options,
        salt=content.salt,
        adapter=content.adapter,
        weight=content.weight,
    )


def _with_question(messages: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """A conversation ends with a user; where the template stops before, somebody's question follows."""
    if messages[-1]["role"] == "user":
        return tuple(messages)
    return (*messages, {"role": "user", "content": "{{ question }}"})


def _digest(renderings: Sequence[Sequence[Mapping[str, Any]]], options: RenderOptions) -> str:
    from blake3 import blake3

    shaping = [renderings, options.tools, options.chat_template_kwargs]
    return blake3(json.dumps(shaping, ensure_ascii=False, default=str).encode()).hexdigest()


def _context_text(context: _Context, path: Path) -> str:
    if context.text is not None:
        return context.text
    if context.file is not None:
        return _text(path.parent / context.file, path)
    return "\n\n".join(_document(document, path) for document in context.documents or ())


def _document(document: str | Mapping[str, str], path: Path) -> str:
    """A document is a file name, `{file: ...}` or `{text: ...}`."""
    if isinstance(document, str):
        return _text(path.parent / document, path)
    if set(document) == {"text"}:
        return document["text"]
    if set(document) == {"file"}:
        return _text(path.parent / document["file"], path)
    raise _refused(path, f"contexts: a document with {sorted(document)}", "Give a file name, {file: …} or {text: …}.")


def _text(target: Path, path: Path) -> str:
    """A file's text; only files below the template's own directory."""
    if not target.resolve().is_relative_to(path.parent.resolve()):
        raise _refused(path, f"{target} is outside the template's directory", "Keep documents below it.")
    try:
        return target.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise _refused(path, f"there is no file {target}", "Correct the name.") from None
    except UnicodeDecodeError as error:
        raise _refused(
            path, f"{target.name} is not UTF-8 ({error.reason} at byte {error.start})", "Save it so."
        ) from None
    except OSError as error:
        raise _refused(path, f"{target}: {error.strerror}", "Make it readable.") from None


def _refused(path: Path, seen: str, do: str) -> TemplateError:
    return TemplateError(f"reading template {path.name}", seen=seen, do=do)
