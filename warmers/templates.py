"""Prompt templates as the domain sees them: messages with every placeholder filled, once for every probe.

Reading template files and filling their placeholders does not belong here (`resources/template_files.py`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from warmers.salts import Adapter

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
    """The cache_salt that its requests carry."""
    adapter: str | None = None
    """The LoRA adapter that they ask for; None: the base model."""
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


def without_adapter(templates: Iterable[Template], adapters: Iterable[Adapter]) -> tuple[Failed, ...]:
    """Those that name an adapter which the fleet has not, failed.

    Without its adapter a prefix cannot be asked for, so none of an earlier version stays in force either.
    """
    names = sorted(adapter.name for adapter in adapters)
    return tuple(
        Failed(
            template.label,
            f"it names the adapter {template.adapter!r}, and the fleet's model.adapters has "
            f"{', '.join(names) or 'none'}. Correct one of them.",
        )
        for template in templates
        if template.adapter is not None and template.adapter not in names
    )
