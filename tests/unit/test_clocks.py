from dataclasses import replace
from datetime import datetime
from math import inf
from zoneinfo import ZoneInfo

import pytest

from resources.clocks import next_turn, present
from resources.placeholders import Fillings
from warmers.fleet import KVShape, Model
from warmers.templates import RenderOptions, Template

UTC = ZoneInfo("UTC")
NOW = datetime(2026, 3, 4, 10, 20, 30, tzinfo=UTC)  # a Wednesday


@pytest.mark.parametrize(
    ("form", "turn"),
    [
        ("%d %B %Y", datetime(2026, 3, 5, tzinfo=UTC)),
        ("%H o'clock", datetime(2026, 3, 4, 11, tzinfo=UTC)),
        ("%p", datetime(2026, 3, 4, 12, tzinfo=UTC)),
        ("week %V", datetime(2026, 3, 9, tzinfo=UTC)),
        ("%B %Y", datetime(2026, 4, 1, tzinfo=UTC)),
        ("%Y", datetime(2027, 1, 1, tzinfo=UTC)),
        ("%H:%M", NOW),
        ("%S", NOW),
        ("%M", NOW),
    ],
)
def test_when_a_clock_turns(form, turn):
    assert next_turn(lambda at: at.strftime(form), NOW) == turn.timestamp()


def test_a_text_without_a_clock_never_turns():
    assert next_turn(lambda at: "no clock", NOW) == inf


def test_midnight_is_that_of_the_zone():
    berlin = ZoneInfo("Europe/Berlin")
    turn = next_turn(lambda at: at.strftime("%d"), NOW.astimezone(berlin))
    assert turn == datetime(2026, 3, 4, 23, tzinfo=UTC).timestamp()


def test_a_date_that_turns_within_the_minute_still_turns_at_midnight():
    late = datetime(2026, 3, 4, 23, 59, 30, tzinfo=UTC)
    midnight = datetime(2026, 3, 5, tzinfo=UTC).timestamp()
    assert next_turn(lambda at: at.strftime("%d"), late) == midnight
    assert next_turn(lambda at: at.strftime("%d"), late.replace(second=59)) == midnight


def model(chat_template):
    return Model("m", "/m", "a", "b", KVShape(1, 1, 1), chat_template)


def clocked(name, text):
    return Template(name, None, "d", Fillings([{"role": "system", "content": text}], {}, {}))


CHAT = "{{ %s }}{% for m in messages %}{{ m.content }}{% endfor %}"


def test_a_template_is_also_taken_as_it_reads_now_until_the_first_of_its_clocks_turns():
    daily, hourly = clocked("daily", "{{ strftime_now('%d') }}"), clocked("hourly", "{{ strftime_now('%H') }}")
    quick, none = clocked("quick", "{{ strftime_now('%M') }}"), clocked("none", "no clock")
    plain = list(present([daily, hourly, quick, none], model("{{ messages }}"), NOW))
    assert [(t.label, t.turns_at) for t in plain] == [
        ("daily@now", datetime(2026, 3, 5, tzinfo=UTC).timestamp()),
        ("hourly@now", datetime(2026, 3, 4, 11, tzinfo=UTC).timestamp()),
    ]
    assert plain[0].renderings[0][0]["content"] == "04"
    dated = list(present([daily, hourly, none], model(CHAT.replace("%s", "strftime_now('%d %b')")), NOW))
    assert [t.label for t in dated] == ["daily@now", "hourly@now", "none@now"]
    assert dated[1].turns_at == plain[1].turns_at
    assert list(present([daily, none], model(CHAT.replace("%s", "strftime_now('%M')")), NOW)) == []


def test_a_chat_template_that_shows_its_clock_with_tools_alone_or_refuses_a_lone_question():
    with_tools = "{% if tools %}{{ strftime_now('%d') }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    plain = clocked("plain", "no clock")
    tools = replace(plain, name="tools", options=RenderOptions(tools=({"type": "function"},)))
    daily = clocked("daily", "{{ strftime_now('%d') }}")
    assert [t.label for t in present([plain, tools, daily], model(with_tools), NOW)] == ["tools@now", "daily@now"]
    strict = (
        "{% if messages[0].role != 'system' %}{{ raise_exception('no system prompt') }}{% endif %}" + CHAT
    ).replace("%s", "strftime_now('%d')")
    lone = replace(plain, name="lone", renderings=Fillings([{"role": "user", "content": "Hi"}], {}, {}))
    assert [t.label for t in present([lone, plain], model(strict), NOW)] == ["plain@now"]
