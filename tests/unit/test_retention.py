"""Which stages go: decided, and carried out on a store that a test can look into."""

import pytest
from fakes import FreeFence

from warmers.errors import LeaseLost
from warmers.retention import DAY_S, Keep, Stage, carry_out, decide

NOW = 100 * DAY_S


def stages(*ages, size=10):
    """Complete ones by their age in days; named a, b, c…"""
    return [Stage(name, size, NOW - age * DAY_S, NOW - age * DAY_S) for name, age in zip("abcdefg", ages, strict=False)]


def gone(found, needed=(), keep=0, keep_days=0.0):
    decided = decide(found, dict.fromkeys(needed, "needed"), Keep(keep, keep_days), NOW)
    return [decision.digest for decision in decided if decision.remove]


def test_what_somebody_needs_stays_whatever_its_age():
    assert gone(stages(0, 40, 80), needed="ac") == ["b"]
    assert gone(stages(0, 40, 80), needed="abc") == []


def test_the_newest_that_nobody_needs_stay():
    assert gone(stages(0, 1, 2, 3), needed="a", keep=2) == ["d"]
    assert gone(stages(0, 1, 2, 3), needed="ac", keep=1) == ["d"]


def test_age_counts_from_when_a_stage_was_superseded_not_from_when_it_was_made():
    assert gone(stages(5, 90), needed="a", keep_days=6) == []
    assert gone(stages(7, 90), needed="a", keep_days=6) == ["b"]


def test_an_incomplete_stage_goes_when_nobody_can_be_writing_to_it():
    written = [Stage("x", 1, None, NOW - DAY_S - 1), Stage("y", 1, None, NOW - DAY_S + 1)]
    assert gone(written, keep=9, keep_days=99) == ["x"]
    assert gone(written, needed="x") == []


def test_every_decision_says_why():
    found = [*stages(0, 1, 40, 50), Stage("x", 1, None, NOW - 7200)]
    said = {d.digest: d.why for d in decide(found, {"a": "served"}, Keep(1, 5), NOW)}
    assert said == {
        "a": "served",
        "b": "one of the 1 newest that nobody needs",
        "c": "superseded 1.0 days ago",
        "d": "superseded 40.0 days ago",
        "x": "incomplete, last written to 2.0 hours ago",
    }


class Store:
    def __init__(self, *current):
        self.answers, self.removed = list(current), []

    def current(self, _):
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def remove(self, _, digest):
        self.removed.append(digest)


def test_what_became_current_since_it_was_decided_on_stays():
    decided = decide(stages(0, 40, 80), {}, Keep(0, 0), NOW)
    store, told = Store({"digest": "b"}), []
    assert [d.digest for d in carry_out(decided, "m", store, FreeFence(), told.append)] == ["a", "c"]
    assert store.removed == ["a", "c"]
    assert told[1] == "removed c, 10 bytes: superseded 40.0 days ago"


def test_nothing_is_removed_once_the_lease_is_lost():
    class Lost(FreeFence):
        def check(self):
            raise LeaseLost("removing", seen="another", do="Run again.")

    store = Store(None)
    with pytest.raises(LeaseLost):
        carry_out(decide(stages(0, 40), {}, Keep(0, 0), NOW), "m", store, Lost(), print)
    assert store.removed == []


def test_of_several_fleets_the_most_careful_counts():
    assert Keep.most_careful([Keep(2, 5), Keep(1, 30)]) == Keep(2, 30)
