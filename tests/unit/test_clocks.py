from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from resources.clocks import next_turn

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
        ("%H:%M", None),
        ("%S", None),
        ("%M", None),
        ("no clock", None),
    ],
)
def test_when_a_clock_turns(form, turn):
    assert next_turn(lambda at: at.strftime(form), NOW) == turn


def test_midnight_is_that_of_the_zone():
    berlin = ZoneInfo("Europe/Berlin")
    turn = next_turn(lambda at: at.strftime("%d"), NOW.astimezone(berlin))
    assert turn.timestamp() == datetime(2026, 3, 4, 23, tzinfo=UTC).timestamp()


def test_a_date_that_turns_within_the_minute_still_turns_at_midnight():
    late = datetime(2026, 3, 4, 23, 59, 30, tzinfo=UTC)
    assert next_turn(lambda at: at.strftime("%d"), late) == datetime(2026, 3, 5, tzinfo=UTC)
    last_second = late.replace(second=59)
    assert next_turn(lambda at: at.strftime("%d"), last_second) == datetime(2026, 3, 5, tzinfo=UTC)
