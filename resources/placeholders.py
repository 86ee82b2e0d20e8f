"""Values for the placeholders of a template, made up where nobody gave any, and the messages filled with them.

Values differ from rendering to rendering, so that what stays the same is what all requests share.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any, overload
from uuid import UUID

from warmers.errors import TemplateError
from warmers.templates import Messages

if TYPE_CHECKING:
    from jinja2 import Environment
    from jinja2 import Template as Text

CLOCKS = (datetime(2026, 1, 15, 9, 7, 31), datetime(2031, 12, 28, 22, 48, 59))
"""Two times that differ in every field."""
CLOCK_NAME = "strftime_now"
"""The function by which chat templates, and ours, read the time."""
IDS = (str(UUID(int=0x1C9E6679_7425_40DE_944B_E07FC1F90AE7)), str(UUID(int=0x9B2D7F00_1A3C_4E5F_8899_AABBCCDDEEFF)))
NAMES = ("Ada Lovelace", "王小明")
# They begin differently, since a BPE merge may cross from the template into what the user writes.
TEXTS = (
    "What should I do next?",
    "\n\nPlease help.",
    "(see below) it fails",
    "7 days ago it worked",
    "数据在哪里?",
    "",
)
MAX_SHOWN = 60
REVISION = 1
"""Of what is made up here; another one means that templates are rendered again."""
MADE_UP: tuple[tuple[frozenset[str], tuple[str, ...]], ...] = (
    (frozenset({"timestamp", "datetime", "now", "clock"}), tuple(c.isoformat() for c in CLOCKS)),
    (frozenset({"date", "today", "day"}), tuple(c.strftime("%A, %d %B %Y") for c in CLOCKS)),
    (frozenset({"time"}), tuple(c.strftime("%H:%M:%S") for c in CLOCKS)),
    (frozenset({"uuid", "id", "request", "session", "trace"}), IDS),
    (frozenset({"username", "customer", "name"}), NAMES),
)
"""Values by a word of the placeholder's name; any other gets user texts."""


@dataclass(frozen=True, slots=True)
class _MadeUp:
    """A made-up value that also stands for an object or a list: `{{ user.name }}` shows the value itself."""

    value: str

    def __str__(self) -> str:
        return self.value

    def __getattr__(self, name: str) -> "_MadeUp":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, key: object) -> "_MadeUp":
        return self

    def __iter__(self) -> Iterator["_MadeUp"]:
        yield self

    def __len__(self) -> int:
        return len(self.value)

    def __add__(self, other: object) -> str:
        return f"{self}{other}"

    def __radd__(self, other: object) -> str:
        return f"{other}{self}"


@dataclass(frozen=True)
class Fillings(Sequence[Messages]):
    """`messages` filled once for every made-up user text; every placeholder varies, but those that are `fixed`.

    Filled when they are asked for: ten thousand templates do not fit into memory filled. Raises TemplateError then for
    what Jinja cannot parse or fill.
    """

    messages: Messages
    probes: Mapping[str, Any]
    fixed: Mapping[str, str]
    clock: datetime | None = None
    """Of all of them; None: two times, in turn."""

    @cached_property
    def names(self) -> frozenset[str]:
        """Every placeholder, the clock among them."""
        return frozenset().union(*(_compiled(message["content"])[1] for message in self.messages))

    @property
    def reads_clock(self) -> bool:
        """Whether the time is in them."""
        return CLOCK_NAME in self.names

    def at(self, clock: datetime) -> "Fillings":
        """The same at one time."""
        return replace(self, clock=clock)

    def __len__(self) -> int:
        return max(len(TEXTS), *(len(values) + 1 for values in self._given.values()), 0)

    @overload
    def __getitem__(self, number: int) -> Messages: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[Messages]: ...

    def __getitem__(self, number: int | slice) -> Messages | Sequence[Messages]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        if not 0 <= number < len(self):
            raise IndexError(number)
        values = {name: self.fixed.get(name, _value(name, self._given.get(name, []), number)) for name in self.names}
        values[CLOCK_NAME] = (self.clock or CLOCKS[number % len(CLOCKS)]).strftime
        return tuple({**message, "content": _render(message["content"], values)} for message in self.messages)

    @cached_property
    def _given(self) -> dict[str, list[Any]]:
        return {name: value if isinstance(value, list) else [value] for name, value in self.probes.items()}


def _value(name: str, given: Sequence[Any], number: int) -> Any:
    """The probes in turn, and a made-up value among them: a placeholder ends the prefix, whatever its probes."""
    turn = number % (len(given) + 1) if given else 0
    if turn < len(given):
        return given[turn]
    words = set(name.lower().split("_"))
    made_up = next((values for known, values in MADE_UP if words & known), TEXTS)
    return _MadeUp(made_up[number % len(made_up)])


@lru_cache(maxsize=256)
def _compiled(source: str) -> "tuple[Text, frozenset[str]]":
    """A message's text, compiled once for all its renderings, and the placeholders in it."""
    from jinja2 import TemplateSyntaxError, meta

    try:
        parsed = _environment().parse(source)
        return _environment().from_string(parsed), frozenset(meta.find_undeclared_variables(parsed))
    except TemplateSyntaxError as error:
        seen = f"Jinja, line {error.lineno} of a message: {error.message}"
    except RecursionError:
        seen = "Jinja: an expression is nested too deeply"
    raise TemplateError("parsing its placeholders", seen=seen, do="Correct it.")


def _render(source: str, values: Mapping[str, Any]) -> str:
    text, _ = _compiled(source)
    try:
        return text.render(values)
    except Exception as error:
        shown = source if len(source) <= MAX_SHOWN else source[:MAX_SHOWN] + "…"
        raise TemplateError(
            f"filling the placeholders of {shown!r}",
            seen=f"{type(error).__name__}: {error}",
            do="Correct the expression, or give probes for what it needs.",
        ) from None


@cache
def _environment() -> "Environment":
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
