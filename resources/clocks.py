"""Templates whose text has the time in it: how they read now, and until when.

A clock ends the prefix that holds for all times. Where it turns no more often than hourly, what follows it is
shared by all requests until it does, and that is warmed too, and again once it has turned.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial

from resources.model_files import reads_clock, render_chat
from resources.placeholders import Fillings
from warmers.errors import TemplateError
from warmers.fleet import Model
from warmers.prefixes import RenderOptions, Template

NOW = "@now"
"""End of the name of a template as it reads at present."""


def present(templates: Iterable[Template], model: Model, now: datetime) -> Iterator[Template]:
    """Templates with a clock, as their requests read until it turns; none for a clock that runs too fast."""
    of_model = next_turn(partial(_asked, model), now) if reads_clock(model) else None
    if reads_clock(model) and of_model is None:
        return
    for template in templates:
        renderings = template.renderings
        if isinstance(renderings, Fillings) and (renderings.reads_clock or of_model):
            with suppress(TemplateError):  # the template itself is rendered too, and will say so
                yield from _present(template, renderings, of_model, now)


def _present(template: Template, renderings: Fillings, of_model: datetime | None, now: datetime) -> Iterator[Template]:
    own = next_turn(lambda at: repr(renderings.at(at)[0]), now) if renderings.reads_clock else None
    if renderings.reads_clock and own is None:
        return
    turn = min(at for at in (own, of_model) if at is not None)
    yield replace(
        template,
        name=f"{template.name}{NOW}",
        digest=f"{template.digest} {turn.isoformat()}",
        renderings=renderings.at(now),
        turns_at=turn.timestamp(),
    )


def _asked(model: Model, at: datetime) -> str:
    """A question in the model's chat template: its clock is the same in every request."""
    return render_chat(model, [{"role": "user", "content": "?"}], RenderOptions(), at)


def next_turn(text: Callable[[datetime], str], now: datetime) -> datetime | None:
    """When `text` changes next, if it is at a full hour or a midnight of the coming year."""
    hour, current = now.replace(minute=0, second=0, microsecond=0), text(now)
    if any(text(hour + timedelta(seconds=s)) != current for s in (0, 1, 60)):  # it runs faster than the hours
        return None
    return next((at for at in _boundaries(hour) if text(at) != current), None)


def _boundaries(hour: datetime) -> Iterator[datetime]:
    """The full hours of a day, then the midnights of a year, on the wall clock of its zone."""
    yield from (hour + timedelta(hours=n) for n in range(1, 25))
    yield from (hour.replace(hour=0) + timedelta(days=n) for n in range(2, 367))
