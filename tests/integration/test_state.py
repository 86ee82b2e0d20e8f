"""The state store on a directory and on a real S3 API: one behaviour."""

import json
import threading

import numpy as np
import pytest
from fakes import DictStore, make_fleet, make_prefix, words

from resources.leases import StateLease
from resources.local_objects import LocalObjects
from resources.state import COMPACT_AT, KEEP, open_state
from resources.system_clock import SystemClock
from warmers.changes import Entry, Listing, SourceFile
from warmers.errors import ConfigError, LeaseHeld, LeaseLost, StateUnavailable
from warmers.ledger import rows_of
from warmers.plan import plan_warm
from warmers.prefixes import PrefixSet
from warmers.presence import look
from warmers.templates import Failed
from warmers.variations import Variation


@pytest.fixture(params=["directory", "s3"])
def state(request, tmp_path):
    return open_state(str(tmp_path / "state") if request.param == "directory" else request.getfixturevalue("s3_uri"))


def plan():
    fleet, store = make_fleet(), DictStore()
    prefixes = [make_prefix(words("abc"), "t", salt="s"), make_prefix(words("q"), "u")]
    return plan_warm(prefixes, fleet, lambda tree: look(store, tree.names, 1, fleet.chunk_bytes))


def test_conditional_writes(state):
    objects = state.objects
    assert objects.read("a/b.json") is None
    assert objects.replace("a/b.json", b"1", None)
    assert not objects.replace("a/b.json", b"2", None)
    content, version = objects.read("a/b.json")
    assert content == b"1"
    assert objects.replace("a/b.json", b"2", version)
    assert not objects.replace("a/b.json", b"3", version)
    assert objects.read("a/b.json")[0] == b"2"
    assert not objects.replace("a/gone.json", b"1", version)
    objects.write("a/c.json", b"x")
    assert objects.list("a") == ["a/b.json", "a/c.json"]
    objects.delete("a/b.json")
    objects.delete("a/b.json")
    assert objects.list("a") == ["a/c.json"]
    assert objects.list("nowhere") == []


def test_one_of_many_writers_wins_each_round(state):
    wins = []

    def write(number):
        if state.objects.replace("race.json", str(number).encode(), None):
            wins.append(number)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wins) == 1
    assert state.objects.read("race.json")[0] == str(wins[0]).encode()


def test_pointers_name_the_latest_and_old_documents_go(state):
    assert state.latest("chat", "plan") is None
    for number in range(KEEP + 3):
        uri = state.point("chat", "plan", f'{{"n": {number}}}'.encode(), ".json", {"n": number})
    assert state.latest("chat", "plan") == {
        "uri": uri, "path": uri.removeprefix(f"{state.uri}/"), "n": KEEP + 2,
    }  # fmt: skip
    assert state.document("chat", "plan") == {"n": KEEP + 2}
    assert len(state.objects.list("fleets/chat/plan")) == KEEP


def test_prefixes_come_back_as_they_went(state):
    one = make_prefix(words("abc"), "t", salt="s", weight=2.5)
    two = make_prefix([], "u", rendered=range(40))
    varying = PrefixSet((one, two), (Failed("bad.yaml", "it is empty"),))
    object.__setattr__(one, "variations", (Variation("line 1", ("a", "b"), 7),))
    state.save_prefixes("chat", varying, {})
    back = state.prefixes("chat")
    assert back.failed == varying.failed
    for before, after in zip(varying.found, back.found, strict=True):
        assert np.array_equal(before.rendered, after.rendered)
        for name in ("template", "context", "digest", "shared", "chunk_tokens", "salt", "weight", "variations"):
            assert getattr(before, name) == getattr(after, name), name
    state.save_prefixes("chat", PrefixSet(), {})
    assert state.prefixes("chat") == PrefixSet()


def test_the_ledger_keeps_every_chunk_through_compaction(state):
    one, journal = plan(), state.journal("ns")
    assert len(journal.rows()) == 0
    for number in range(COMPACT_AT + 2):
        journal.record(rows_of(one, [number % 4], warmed_at=float(number)))
    rows = journal.rows()
    assert sorted(rows.chunk_ids()) == sorted(rows_of(one, range(4)).chunk_ids())
    assert rows.warmed_at.max() == COMPACT_AT + 1
    assert len(state.objects.list("namespaces/ns/ledger")) < COMPACT_AT


def test_a_lease_excludes_renews_and_hands_on_a_higher_number(state):
    lease = StateLease(state.objects, SystemClock())
    with lease.hold("ns", 0.9) as first:
        with pytest.raises(LeaseHeld, match="holds it for"), lease.hold("ns", 0.9):
            pass
        threading.Event().wait(1.2)  # longer than the lease: only the heartbeat keeps it
        first.check()
    with lease.hold("ns", 5) as second:
        assert second.number == first.number + 1
        second.check()
    with lease.hold("ns", 0.3) as third:
        state.objects.delete("namespaces/ns/lease.json")
        assert third.lost.wait(5)
        with pytest.raises(LeaseLost):
            third.check()


def test_a_renewal_whose_answer_was_lost_is_no_lost_lease(tmp_path):
    class Lossy(LocalObjects):
        def replace(self, path, content, version):
            written = super().replace(path, content, version)
            renewals.append(written)
            return written and len(renewals) != 2

    renewals = []
    with StateLease(Lossy(tmp_path), SystemClock()).hold("ns", 0.6) as fence:
        assert not fence.lost.wait(1.5)
        fence.check()
    assert len(renewals) > 3


def test_a_dead_holders_lease_expires(state):
    state.objects.write("namespaces/ns/lease.json", b'{"holder": "dead", "fence": 4, "expires_at": 1.0}')
    with StateLease(state.objects, SystemClock()).hold("ns", 5) as fence:
        assert fence.number == 5


@pytest.mark.parametrize("ahead_s", [1, 3600])
def test_a_holder_that_died_just_now_is_waited_for_even_if_its_clock_was_ahead(state, ahead_s):
    record = {"holder": "dead", "fence": 4, "expires_at": SystemClock().now() + ahead_s}
    state.objects.write("namespaces/ns/lease.json", json.dumps(record).encode())
    with StateLease(state.objects, SystemClock()).hold("ns", 1.5) as fence:
        assert fence.number == 5


def test_a_store_that_cannot_be_written_says_so(tmp_path, s3_uri):
    (tmp_path / "file").touch()
    with pytest.raises(StateUnavailable, match="writing"):
        open_state(str(tmp_path / "file")).objects.write("a", b"x")
    with pytest.raises(StateUnavailable, match="put_object"):
        open_state("s3://no-such-bucket-here/x").objects.write("a", b"x")
    with pytest.raises(ConfigError, match="ftp"):
        open_state("ftp://host/x")


def test_an_s3_that_is_away_says_so_whatever_is_asked(s3_uri, s3_away):
    calls = (
        lambda o: o.read("a"),
        lambda o: o.write("a", b"x"),
        lambda o: o.replace("a", b"x", None),
        lambda o: o.list("a"),
        lambda o: o.delete("a"),
        lambda o: o.stamps(),
    )
    with s3_away():
        for call in calls:
            with pytest.raises(StateUnavailable, match="EndpointConnectionError"):
                call(open_state(s3_uri).objects)


def test_a_listing_of_another_format_is_looked_at_anew(state):
    listing = Listing({"a": Entry("a.md", "1")}, {"b.md": "why"}, {"a.md": SourceFile("s", ("docs/x",))})
    state.save_listing("chat", listing)
    assert state.listing("chat") == listing
    state.point("chat", "templates", b'{"templates": {"a": ["a.md"]}}', ".json", {"digest": "d"})
    assert state.listing("chat") == Listing()
