from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmers.windows import Lead, Offering, OffPeak, Reservation, admission, rank, window_of

HOUR = 3600.0
NOON = datetime(2026, 12, 7, 12, 0, tzinfo=UTC).timestamp()
"""A Monday."""
LEAD = Lead(600, 600, 900, 600)  # 45 minutes
BLOCK = Reservation(
    "cr-1", "capacity-block", "active", "p5.48xlarge", "us-east-1a", 2, 2, NOON - HOUR, NOON + 24 * HOUR
)


def moment(day, hour, minute=0):
    return datetime(2026, 12, day, hour, minute, tzinfo=UTC).timestamp()


def test_a_block_drains_forty_minutes_before_its_end_and_an_ultraserver_seventy():
    for ultra, minutes in ((False, 40), (True, 70)):
        window = window_of(replace(BLOCK, ultraserver=ultra), NOON)
        assert (window.closes_at, window.usable) == (BLOCK.end - minutes * 60, True)
        assert window.admits_until(LEAD) == BLOCK.end - minutes * 60 - LEAD.total_s


def test_other_reservations_end_when_they_end_or_never():
    ends = window_of(replace(BLOCK, kind="default"), NOON)
    never = window_of(replace(BLOCK, kind="default", end=None), NOON)
    assert (ends.closes_at, never.closes_at, never.admits_until(LEAD)) == (BLOCK.end, None, None)


@pytest.mark.parametrize(
    ("state", "certain", "why"),
    [
        ("active", True, ""),
        ("scheduled", True, ""),
        ("payment-pending", False, "it is payment-pending, and may never come"),
        ("assessing", False, "may never come"),
        ("delayed", False, "may never come"),
        *((state, False, f"it is {state}") for state in ("expired", "cancelled", "failed", "payment-failed")),
        *((state, False, f"it is {state}") for state in ("unsupported", "unavailable", "cancelling", "something new")),
    ],
)
def test_what_a_state_means(state, certain, why):
    window = window_of(replace(BLOCK, state=state), NOON)
    assert window.usable == certain
    assert why in window.why_not
    assert (admission([window], LEAD, (), NOON) is not None) == certain


def test_a_roll_out_begins_now_or_when_the_next_window_opens_and_never_too_late():
    short = window_of(replace(BLOCK, end=NOON + 1.4 * HOUR), NOON)  # 84 minutes: 40 of drain, 44 left, 45 needed
    later = window_of(replace(BLOCK, id="cr-2", state="scheduled", start=NOON + 5 * HOUR), NOON)
    assert admission([short], LEAD, (), NOON) is None
    assert admission([short, later], LEAD, (), NOON).at == NOON + 5 * HOUR
    longer = window_of(replace(BLOCK, end=NOON + 1.5 * HOUR), NOON)
    assert admission([longer, later], LEAD, (), NOON) == admission([longer], LEAD, (), NOON)
    assert admission([longer], LEAD, (), NOON).at == NOON
    drained = window_of(replace(BLOCK, end=NOON + 0.5 * HOUR), NOON)
    assert (drained.usable, drained.why_not) == (False, "its drain has begun")


NIGHT = OffPeak(frozenset(range(7)), (22, 0), (6, 0), UTC)


def test_off_peak_hours_go_over_midnight():
    window = window_of(BLOCK, NOON)
    assert admission([window], LEAD, [NIGHT], NOON).at == moment(7, 22)
    assert admission([window], LEAD, [NIGHT], moment(7, 23)).at == moment(7, 23)
    assert admission([window], LEAD, [NIGHT], moment(8, 3)).at == moment(8, 3), "of the night that began yesterday"
    assert admission([window], LEAD, [NIGHT], moment(8, 6)) is None, "the next night is after the block"


def test_off_peak_days_and_a_change_of_clocks():
    weekend = OffPeak(frozenset({5, 6}), (0, 0), (23, 59), UTC)
    endless = window_of(replace(BLOCK, kind="default", end=None), NOON)
    assert admission([endless], LEAD, [weekend], NOON).at == moment(12, 0)
    night = OffPeak(frozenset(range(7)), (1, 0), (5, 0), ZoneInfo("Europe/Berlin"))
    saturday = datetime(2027, 3, 27, 12, tzinfo=UTC).timestamp()  # clocks go from 2 to 3 in the night to Sunday
    since, until = next(iter(night.intervals(saturday)))
    assert (until - since) / HOUR == 3


@given(
    st.lists(
        st.builds(
            Reservation,
            id=st.just("cr"),
            kind=st.sampled_from(["capacity-block", "default"]),
            state=st.sampled_from(["active", "scheduled", "payment-pending", "expired"]),
            instance_type=st.just("p5"),
            zone=st.just("a"),
            instances=st.just(1),
            available=st.just(1),
            start=st.floats(NOON - 48 * HOUR, NOON + 48 * HOUR),
            end=st.none() | st.floats(NOON - 24 * HOUR, NOON + 96 * HOUR),
            ultraserver=st.booleans(),
        ),
        max_size=4,
    ),
    st.lists(st.just(NIGHT), max_size=1),
)
def test_whatever_there_is_a_roll_out_has_its_time_before_the_drain(reservations, off_peak):
    found = admission([window_of(one, NOON) for one in reservations], LEAD, off_peak, NOON)
    if found is not None:
        one = found.window.reservation
        assert one.state in ("active", "scheduled")
        assert found.at >= max(NOON, one.start)
        drain = 0 if one.kind == "default" else 70 * 60 if one.ultraserver else 40 * 60
        assert one.end is None or found.at + LEAD.total_s + drain <= one.end + 1e-3
        assert not off_peak or any(since <= found.at < until for since, until in NIGHT.intervals(NOON))


def test_offerings_are_ranked_by_what_can_be_used_of_them():
    def offer(id, fee, hours, **more):
        given = {"instances": 2, "accelerators": 8, "currency": "USD"} | more
        return Offering(id, "p5.48xlarge", "a", start=NOON, end=NOON + hours * HOUR, fee=Decimal(fee), **given)

    day, short, dear = offer("day", "943.68", 24), offer("short", "100", 1), offer("dear", "1000.00", 24)
    euros, unknown = offer("euros", "1", 24, currency="EUR"), offer("unknown", "1", 24, accelerators=0)
    assert day.usable_hours(LEAD, NOON) == pytest.approx(24 - 85 / 60)
    assert day.fee_per_usable_hour(LEAD, NOON) == pytest.approx(Decimal("943.68") / Decimal(16 * (24 - 85 / 60)))
    assert short.fee_per_usable_hour(LEAD, NOON) is None, "an hour is less than drain and lead take"
    assert [o.id for o in rank([short, dear, unknown, day, euros], LEAD, NOON)] == [
        "euros", "day", "dear", "unknown", "short",
    ]  # fmt: skip
