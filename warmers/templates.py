"""Prompt templates as the domain sees them: messages with every placeholder filled, once for every probe.

Reading template files and filling their placeholders does not belong here (`resources/template_files.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Messages = Sequence[Mapping[str, Any]]
"""OpenAI chat messages, placeholders filled."""


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """What goes with the messages into the chat template."""

    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Template:
    """One template with one of its contexts, filled once for every probe."""

    name: str
    context: str | None
    digest: str
    """Of everything that shapes the token ids: filled messages, tools, template arguments."""
    renderings: Sequence[Messages]
    options: RenderOptions = RenderOptions()
    salt: str = ""
    adapter: str | None = None
    weight: float = 1.0
    source: str = ""
    """The file it comes from."""
    turns_at: float | None = None
    """For a template as its clock has it now: when that turns, in seconds since the epoch. None: for all times."""

    @property
    def label(self) -> str:
        """`template` or `template/context`."""
        return self.name if self.context is None else f"{self.name}/{self.context}"


@dataclass(frozen=True, slots=True)
class Failed:
    """A template that could not be read or rendered; it harms no other."""

    template: str
    """Its label, or its file where that could not be read."""
    reason: str
    source: str = ""
    """Its file."""
