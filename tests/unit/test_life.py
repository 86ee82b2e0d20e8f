"""The life of a chunk: what is extended and removed, by single cases and by a machine that tries to lose a live key."""

from dataclasses import replace

import numpy as np
import pytest
from fakes import DictStore, FakeClock, FreeFence, MemoryJournal, make_fleet, make_prefix, words
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from warmers.budget import afford
from warmers.errors import StoreUnavailable
from warmers.inventory import NEAR, headroom_findings, keys_of, look_into, take_stock
from warmers.keys import KeyLayout
from warmers.ledger import rows_of
from warmers.life import (
    NamespaceRecord,
    carry_out_life,
    chunks_of,
    decide_namespaces,
    plan_life,
    remove_lapsed,
    remove_namespace,
)
from warmers.plan import plan_warm
from warmers.presence import StoreUsage, look

TTL_S = 1_000
GRACE_S = 200.0


class Bench:
    """A fleet that was warmed once, as a ledger, a store and a clock."""

    def __init__(self, *texts, tp=1, **fleet):
        self.clock = FakeClock()
        self.fleet = replace(make_fleet(tp=tp), ttl_s=TTL_S, **fleet)
        self.store, self.journal = DictStore(self.clock), MemoryJournal()
        self.publish(*texts)

    def publish(self, *texts):
        self.prefixes = [make_prefix(words(text), text) for text in texts]

    def plan(self):
        ranks, size = self.fleet.engine.tensor_parallel, self.fleet.chunk_bytes
        return plan_warm(self.prefixes, self.fleet, lambda tree: look(self.store, tree.names, ranks, size))

    def warm(self):
        plan = self.plan()
        missing = [int(c) for c in (~plan.presence.complete).nonzero()[0]]
        for name in plan.tree.names_of(missing):
            self.store.put(name, bytes(self.fleet.chunk_bytes), self.fleet.ttl_s)
        self.journal.record(rows_of(plan, missing, warmed_at=self.clock.time))

    def needed(self):
        return chunks_of(self.prefixes, self.fleet)

    def look(self):
        return look_into(self.store, self.journal.rows(), self.fleet)

    def stock(self, usage, last_evicted, now=0.0):
        return take_stock(self.look(), self.prefixes, self.fleet, usage, last_evicted, now)

    def life(self):
        return plan_life(self.look(), self.needed(), self.fleet, GRACE_S, self.clock.time)

    def carry_out(self, plan, *, apply=True, needed=None, fence=None):
        return carry_out_life(
            plan, self.fleet, self.store, self.journal, fence or FreeFence(), needed or self.needed,
            self.clock.time, apply=apply,
        )  # fmt: skip


@pytest.fixture
def bench():
    bench = Bench("ab", "ac")
    bench.warm()
    return bench


def test_nothing_happens_to_what_is_young_and_needed(bench):
    plan = bench.life()
    assert (len(plan.extend), len(plan.remove), len(plan.forget)) == (0, 0, 0)


@pytest.mark.parametrize("tp", [1, 2])
def test_what_is_needed_is_extended_before_half_of_its_life_is_over_and_not_all_to_one_moment(tp):
    bench = Bench("abcdefgh", tp=tp)
    bench.warm()
    bench.clock.time += TTL_S * NEAR + 1
    done = bench.carry_out(bench.life(), apply=False)
    assert done.extended == 8
    left = bench.store.lives(list(keys_of(bench.journal.rows(), bench.fleet)))
    assert (left > NEAR * TTL_S).all()
    assert (left <= TTL_S).all()
    assert len(set(left.tolist())) == 8
    assert (bench.journal.rows().refreshed_at == bench.clock.time).all()


def test_a_chunk_of_which_one_rank_is_near_its_end_is_extended_on_every_rank():
    bench = Bench("ab", tp=2)
    bench.warm()
    bench.store.extend(list(keys_of(bench.journal.rows(), bench.fleet))[:1], np.array([10]))
    assert len(bench.life().extend) == 1


def test_what_no_plan_needs_goes_after_its_grace_and_not_without_apply(bench):
    bench.publish("ab")
    assert len(bench.life().remove) == 0
    bench.clock.time += GRACE_S + 1
    plan = bench.life()
    assert plan.removed_by_template() == [("ac", 1, bench.fleet.chunk_bytes)]
    assert bench.carry_out(plan, apply=False).removed == 0
    assert len(bench.store.values) == 3
    done = bench.carry_out(bench.life())
    assert (done.removed, done.removed_bytes) == (1, bench.fleet.chunk_bytes)
    assert set(bench.store.values) == set(bench.plan().tree.names)
    assert len(bench.journal.rows()) == 2


def test_the_grace_counts_from_when_somebody_last_saw_it_needed(bench):
    bench.clock.time += GRACE_S + 1
    bench.carry_out(bench.life())
    bench.publish("ab")
    assert len(bench.life().remove) == 0


def test_a_template_that_comes_back_between_plan_and_removal_keeps_its_chunks(bench):
    bench.publish("ab")
    bench.clock.time += GRACE_S + 1
    plan = bench.life()
    bench.publish("ab", "ac")
    done = bench.carry_out(plan)
    assert (done.removed, done.spared) == (0, 1)
    assert bench.plan().missing_chunks == 0


def test_what_is_gone_already_and_not_needed_is_forgotten_and_what_is_needed_is_not(bench):
    bench.publish("ab")
    bench.clock.time += TTL_S + 1
    plan = bench.life()
    assert (len(plan.remove), len(plan.forget)) == (0, 1)
    bench.carry_out(plan)
    assert len(bench.journal.rows()) == 2


def test_a_value_of_a_wrong_size_that_nobody_needs_goes_as_well(bench):
    bench.publish("ab")
    bench.store.put(next(name for name in bench.store.values if name not in bench.plan().tree.names), b"x", TTL_S)
    bench.clock.time += GRACE_S + 1
    assert bench.carry_out(bench.life()).removed == 1
    assert len(bench.store.values) == 2


def test_a_kill_in_the_middle_loses_no_needed_row_and_the_next_run_finishes():
    bench = Bench(*("a" + letter for letter in "bcdefgh"))
    bench.warm()
    bench.publish("ab")
    bench.clock.time += GRACE_S + 1
    whole = bench.store.delete
    bench.store.delete = lambda keys: (whole(keys[:3]), (_ for _ in ()).throw(StoreUnavailable("x", seen="y", do="z")))
    with pytest.raises(StoreUnavailable):
        bench.carry_out(bench.life())
    bench.store.delete = whole
    assert len(bench.journal.rows()) == 8
    bench.carry_out(bench.life())
    assert set(bench.store.values) == set(bench.plan().tree.names)
    assert len(bench.journal.rows()) == 2


def test_without_a_ttl_nothing_is_extended():
    bench = Bench("ab", store="s3")
    bench.fleet = replace(bench.fleet, ttl_s=None)
    bench.warm()
    assert len(bench.life().extend) == 0
    assert np.isinf(bench.look().lives).all()


# Inventory


def test_an_inventory_counts_by_chunk_and_by_leading_tokens():
    bench = Bench("abcd", "x")
    bench.warm()
    names = bench.plan().tree.names
    bench.store.delete(names[1:2])
    bench.store.put(names[2], b"short", TTL_S)
    seen = bench.stock(bench.store.usage(), None, 5.0)
    assert (seen.chunks, seen.present, seen.missing, seen.wrong_size, seen.near_end) == (5, 3, 1, 1, 0)
    assert (seen.needed, seen.held_bytes) == (5, 3 * bench.fleet.chunk_bytes)
    stock = {p.label: (p.warmed_tokens, p.held_tokens) for p in seen.prefixes}
    assert stock == {"abcd": (64, 16), "x": (16, 16)}
    assert seen.hit_rate == 32 / 80
    assert seen.prefixes[0].label == "abcd"


def test_what_was_never_warmed_is_no_drift():
    bench = Bench("ab")
    bench.warm()
    bench.publish("ab", "xy")
    seen = bench.stock(StoreUsage(evicted_keys=7), 3)
    assert (seen.hit_rate, seen.evicted_since) == (1.0, 4)
    assert bench.stock(StoreUsage(evicted_keys=1), 3).evicted_since is None


@pytest.mark.parametrize(
    ("usage", "adding", "evicted", "said"),
    [
        (StoreUsage(), 10**12, None, ()),
        (StoreUsage(10, 100, "volatile-lru"), 50, 0, ()),
        (StoreUsage(10, 100, "volatile-lru"), 91, None, ("91 bytes are to be warmed, and 90 are free: others are",)),
        (StoreUsage(10, 100, "noeviction"), 91, None, ("what is warmed then is refused",)),
        (StoreUsage(10, 100), 91, None, ("what is warmed then is refused",)),
        (StoreUsage(95, 100, "allkeys-lru"), 0, None, ("95 of 100 bytes are in use",)),
        (StoreUsage(1, None, "allkeys-random"), 0, None, ("allkeys-random evicts warmed chunks",)),
        (StoreUsage(1, 100, "volatile-lru"), 0, 12, ("12 keys were evicted",)),
    ],
)
def test_headroom(usage, adding, evicted, said):
    found = headroom_findings(usage, adding, evicted)
    assert len(found) == len(said)
    assert all(part in finding for part, finding in zip(said, found, strict=True))


# Budget


def test_the_heavier_prefixes_are_afforded_and_shared_chunks_paid_once():
    fleet = make_fleet()
    a, b, c = (make_prefix(words(text), text, weight=w) for text, w in (("abx", 1.0), ("aby", 3.0), ("z", 2.0)))
    rich, poor = replace(fleet, budget_bytes=5 * fleet.chunk_bytes), replace(fleet, budget_bytes=4 * fleet.chunk_bytes)
    assert [p.label for p in afford([a, b, c], rich)[0]] == ["abx", "aby", "z"]
    kept, left = afford([a, b, c], poor)
    assert ([p.label for p in kept], [p.label for p in left]) == (["aby", "z"], ["abx"])


def test_what_is_over_budget_is_neither_planned_nor_needed():
    bench = Bench("ab", "cd")
    bench.warm()
    bench.fleet = replace(bench.fleet, budget_bytes=3 * bench.fleet.chunk_bytes)
    plan = bench.plan()
    assert (plan.over_budget, len(plan.tree.hashes)) == (("cd",), 2)
    assert {plan.tree.chunk_id(chunk) for chunk in range(2)} == bench.needed()
    bench.clock.time += GRACE_S + 1
    assert bench.carry_out(bench.life()).removed == 2


# Namespaces


def records(**superseded):
    return [NamespaceRecord(name, f"{name}@", "Valkey", at) for name, at in superseded.items()]


def test_a_superseded_namespace_is_marked_first_and_removed_after_its_grace():
    [new, old] = decide_namespaces(records(new=None, old=None), {"new": "warmed"}, "Valkey", 100, 1_000)
    assert (new.remove, new.why, new.record.superseded_at) == (False, "warmed", None)
    assert (old.remove, old.record.superseded_at) == (False, 1_000)
    assert decide_namespaces([old.record], {}, "Valkey", 100, 1_101)[0].remove


def test_a_namespace_that_is_needed_again_is_superseded_no_more():
    [back] = decide_namespaces(records(old=0.0), {"old": "rolled back to"}, "Valkey", 100, 1_000)
    assert (back.remove, back.record.superseded_at) == (False, None)


def test_a_namespace_in_another_l2_is_left_alone():
    [old] = decide_namespaces(records(old=0.0), {}, "the bucket b", 100, 1_000)
    assert not old.remove
    assert "it is in Valkey" in old.why


def test_a_namespace_that_is_needed_again_while_it_is_removed_keeps_the_rest():
    store = DictStore()
    for number in range(12):
        store.put(f"old@{number:02}", b"x")
    answers = iter([False, True])
    assert remove_namespace(records(old=0.0)[0], store, FreeFence(), lambda: next(answers)) is None
    assert len(store.values) == 7
    assert remove_namespace(records(old=0.0)[0], store, FreeFence(), lambda: False) == 7
    assert store.values == {}


def test_what_nobody_uses_lapses_where_the_tier_forgets_nothing_unless_a_plan_needs_it(monkeypatch):
    bench = Bench("ab")
    bench.warm()
    layout = KeyLayout.of(bench.fleet)
    users = layout.name("f" * 64, 0)
    bench.store.put(users, b"x", TTL_S)
    monkeypatch.setattr(bench.store, "lives", lambda keys: np.zeros(len(keys)))
    assert remove_lapsed(layout, bench.needed, bench.store, FreeFence(), apply=False) == 1
    assert users in bench.store.values
    assert remove_lapsed(layout, bench.needed, bench.store, FreeFence(), apply=True) == 1
    assert set(bench.store.values) == set(bench.plan().tree.names)


# The machine

TEXTS = ("ab", "ac", "acd", "x", "xy", "m")
published = st.sets(st.sampled_from(TEXTS)).map(sorted)
fleet_names = st.sampled_from(["chat", "code"])
races = st.one_of(st.none(), published)
kills = st.one_of(st.none(), st.integers(1, 2))


class Killed(Exception):
    """A process that was ended between two calls."""


class GuardedStore(DictStore):
    """Says of each deletion what it was allowed to take, before it happens; and may be killed before it."""

    def __init__(self, clock, is_live):
        super().__init__(clock)
        self.is_live, self.deletions, self.kill_at = is_live, 0, None

    def remove(self, keys):
        self.deletions += 1
        if self.deletions == self.kill_at:
            raise Killed
        live = [key for key in keys if self.is_live(key)]
        assert not live, f"deleted while a plan needs them: {live}"
        super().delete(keys)


class Served:
    """A fleet of the machine: its prefixes, its namespaces with a ledger each, and which one it was proven in."""

    def __init__(self, name, clock, store):
        self.clock, self.store, self.journals = clock, store, {}
        self.fleet = replace(make_fleet(name=name), ttl_s=TTL_S)
        self.prefixes, self.records, self.proven, self.warmed = [], {}, None, {}

    def live_names(self):
        """Of the current prefixes in the current namespace, and of a whole one to which the fleet may roll back."""
        tree = plan_warm(self.prefixes, self.fleet, lambda tree: look(DictStore(), tree.names, 1, 1)).tree
        return set(tree.names)

    def needed(self):
        return chunks_of(self.prefixes, self.fleet)

    def namespaces_needed(self):
        return {name: "needed" for name in (self.fleet.namespace, self.proven) if name}

    @property
    def journal(self):
        return self.journals.setdefault(self.fleet.namespace, MemoryJournal())


class LifeMachine(RuleBasedStateMachine):
    """Two fleets in one store; templates, weights and time change at any moment, and runs are killed at any."""

    def __init__(self):
        super().__init__()
        self.clock = FakeClock()
        self.store = GuardedStore(self.clock, self.is_live)
        self.store.delete = self.store.remove
        self.fleets = {name: Served(name, self.clock, self.store) for name in ("chat", "code")}

    def is_live(self, key):
        held = key in self.store.values and self.store.ends.get(key, np.inf) > self.clock.time
        return held and any(
            key in served.live_names() or (served.proven and key.startswith(f"{served.proven}@"))
            for served in self.fleets.values()
            if key.startswith(f"{served.fleet.name}-")
            and not (served.proven == served.fleet.namespace and key not in served.live_names())
        )

    @initialize(texts=published)
    def begin(self, texts):
        for name in self.fleets:
            self.publish(name, texts)
            self.warm(name)

    @rule(name=fleet_names, texts=published)
    def publish(self, name, texts):
        self.fleets[name].prefixes = [make_prefix(words(text), text) for text in texts]

    @rule(name=fleet_names)
    def warm(self, name):
        served = self.fleets[name]
        fleet = served.fleet
        record = NamespaceRecord(fleet.namespace, KeyLayout.of(fleet).start, "Valkey")
        served.records[fleet.namespace] = record
        plan = plan_warm(served.prefixes, fleet, lambda tree: look(self.store, tree.names, 1, fleet.chunk_bytes))
        missing = [int(c) for c in (~plan.presence.complete).nonzero()[0]]
        for key in plan.tree.names_of(missing):
            self.store.put(key, bytes(fleet.chunk_bytes), TTL_S)
        served.journal.record(rows_of(plan, missing, warmed_at=self.clock.time))

    @rule(name=fleet_names)
    def prove(self, name):
        self.fleets[name].proven = self.fleets[name].fleet.namespace

    @rule(name=fleet_names, weights=st.sampled_from("abc"))
    def change_weights(self, name, weights):
        served = self.fleets[name]
        served.fleet = replace(served.fleet, model=replace(served.fleet.model, weights_digest=weights * 64))

    @rule(name=fleet_names, number=st.integers(0, 3))
    def a_user_asks(self, name, number):
        layout = KeyLayout.of(self.fleets[name].fleet)
        self.store.put(layout.name(f"{number:064x}", 0), b"user", TTL_S)

    @rule(seconds=st.sampled_from([1.0, GRACE_S + 1, TTL_S / 2 + 1, TTL_S + 1]))
    def time_passes(self, seconds):
        self.clock.time += seconds

    @rule(name=fleet_names, apply=st.booleans(), kill=kills, before=races, amid=races)
    def retain(self, name, apply, kill, before, amid):
        """Under the lease, so no other run warms meanwhile; templates change all the same, also in the middle."""
        served = self.fleets[name]
        fleet, journal, races = served.fleet, served.journal, iter([amid])
        held = look_into(self.store, journal.rows(), fleet)
        plan = plan_life(held, served.needed(), fleet, GRACE_S, self.clock.time)
        self._race(name, before)

        def needed():
            self._race(name, next(races, None))
            return served.needed()

        self._run(kill, lambda: carry_out_life(
            plan, fleet, self.store, journal, FreeFence(), needed, self.clock.time, apply=apply
        ))  # fmt: skip

    def _race(self, name, texts):
        if texts is not None:
            self.publish(name, texts)

    @rule(name=fleet_names, kill=kills)
    def retire_namespaces(self, name, kill):
        served = self.fleets[name]
        records, needed = list(served.records.values()), served.namespaces_needed()
        for decision in decide_namespaces(records, needed, "Valkey", GRACE_S, self.clock.time):
            served.records[decision.record.name] = decision.record
            if decision.remove:
                self._run(kill, lambda record=decision.record: self._remove(served, record))

    def _remove(self, served, record):
        is_needed = lambda: record.name in served.namespaces_needed()  # noqa: E731
        if remove_namespace(record, self.store, FreeFence(), is_needed) is not None:
            served.journals.pop(record.name, None)
            served.records.pop(record.name)

    def _run(self, kill, act):
        self.store.kill_at = self.store.deletions + kill if kill else None
        try:
            act()
        except Killed:
            pass
        finally:
            self.store.kill_at = None

    @invariant()
    def every_live_chunk_that_is_there_is_in_the_ledger(self):
        """Or nobody would extend it."""
        for served in self.fleets.values():
            ours = {key for key in served.live_names() if self.store.values.get(key, b"user") != b"user"}
            assert ours <= set(keys_of(served.journal.rows(), served.fleet))


LifeMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestLifeMachine = LifeMachine.TestCase
