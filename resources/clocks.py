"""Templates whose text has the time in it: how they read now, and until when.

A clock ends the prefix that holds for all times. Where it turns no more often than hourly, what follows it is
shared by all requests until it does, and that is warmed too, and again once it has turned.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from math import inf

from resources.model_files import reads_clock, render_chat
from resources.placeholders import Fillings
from warmers.errors import TemplateError
from warmers.fleet import Model
from warmers.templates import Messages, RenderOptions, Template

NOW = "@now"
"""End of the name of a template as it reads at present."""


def present(templates: Iterable[Template], model: Model, now: datetime) -> Iterator[Template]:
    """Templates with a clock, as their requests read until it turns; none for a clock that runs too fast."""
    of_model = dict[str, float]()
    for template in templates:
        if isinstance(template.renderings, Fillings):
            with suppress(TemplateError):  # the template itself is rendered too, and will say so
                filled = template.renderings.at(now)
                of_chat = _turn(model, filled[0], template.options, now, of_model)
                turn = min(_own_turn(template.renderings, now), of_chat)
                if now.timestamp() < turn < inf:
                    yield replace(
                        template,
                        name=f"{template.name}{NOW}",
                        digest=f"{template.digest} {turn:.0f} {now.tzinfo}",
                        renderings=filled,
                        turns_at=turn,
                    )


def _own_turn(renderings: Fillings, now: datetime) -> float:
    return next_turn(lambda at: repr(renderings.at(at)[0]), now) if renderings.reads_clock else inf


def _turn(model: Model, messages: Messages, options: RenderOptions, now: datetime, known: dict[str, float]) -> float:
    """When the chat template's clock turns; asked once for all requests of one form."""
    if not reads_clock(model):
        return inf
    roles = [message["role"] for message in messages]
    form = json.dumps([roles, options.tools, options.chat_template_kwargs])
    if form not in known:
        known[form] = next_turn(partial(render_chat, model, messages, options), now)
    return known[form]


def next_turn(text: Callable[[datetime], str], now: datetime) -> float:
    """When `text` changes next, at a full hour of the coming day or a midnight of the coming year.

    Seconds since the epoch. inf: it does not, there is no clock in it. `now`: it runs faster than the hours.
    """
    hour, current = now.replace(minute=0, second=0, microsecond=0), text(now)
    if any(text(hour + timedelta(seconds=s)) != current for s in (0, 1, 60)):
        return now.timestamp()
    return next((at.timestamp() for at in _boundaries(hour) if text(at) != current), inf)


def _boundaries(hour: datetime) -> Iterator[datetime]:
    """The full hours of a day, then the midnights of a year, on the wall clock of its zone."""
    yield from (hour + timedelta(hours=n) for n in range(1, 25))
    yield from (hour.replace(hour=0) + timedelta(days=n) for n in range(2, 367))
