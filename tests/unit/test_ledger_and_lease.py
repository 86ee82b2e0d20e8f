from fakes import DictStore, make_fleet, make_prefix, words
from hypothesis import given
from hypothesis import strategies as st

from warmers.lease import LeaseRecord, claim, release, renew
from warmers.ledger import Rows, merge, rows_by_chunk, rows_of, unknown_chunks
from warmers.plan import plan_warm
from warmers.presence import look


def plan():
    fleet, store = make_fleet(tp=2), DictStore()
    prefixes = [make_prefix(words("abc"), "t")]
    return plan_warm(prefixes, fleet, lambda tree: look(store, tree.names, 2, fleet.chunk_bytes))


def test_rows_name_the_chunk_its_source_and_its_bytes_over_all_ranks():
    one = plan()
    rows = rows_of(one, [0, 2], warmed_at=10.0)
    assert rows.chunk_ids() == [one.tree.chunk_id(i) for i in (0, 2)]
    assert rows.bytes.tolist() == [2 * one.fleet.chunk_bytes] * 2
    assert rows.template.tolist() == ["t", "t"]
    assert unknown_chunks(one.tree, [0, 1, 2], rows) == [1]


def test_the_latest_row_wins_and_no_time_is_forgotten():
    one = plan()
    merged = merge([rows_of(one, [0, 1], warmed_at=10.0), rows_of(one, [1], proven_at=20.0)])
    assert len(merged) == 2
    assert merged.warmed_at.tolist() == [10.0, 10.0]
    assert dict(zip(merged.chunk_ids(), merged.proven_at, strict=True)) == {
        one.tree.chunk_id(0): 0.0,
        one.tree.chunk_id(1): 20.0,
    }
    assert len(merge([])) == len(Rows.empty()) == 0


@given(
    st.lists(st.tuples(st.text("ab", min_size=1, max_size=3), st.sampled_from(["", "s", "t"])), max_size=6), st.data()
)
def test_every_chunk_finds_its_row_under_its_own_salt(asked, data):
    fleet = make_fleet()
    prefixes = [make_prefix(words(text), f"{n}", salt=salt) for n, (text, salt) in enumerate(asked)]
    whole = plan_warm(prefixes, fleet, lambda tree: look(DictStore(), tree.names, 1, fleet.chunk_bytes))
    chunks = range(len(whole.tree.hashes))
    rows = rows_of(whole, data.draw(st.permutations([n for n in chunks if data.draw(st.booleans())])))
    ids = rows.chunk_ids()
    expected = [ids.index(whole.tree.chunk_id(n)) if whole.tree.chunk_id(n) in ids else -1 for n in chunks]
    assert rows_by_chunk(whole.tree, rows).tolist() == expected


@given(st.lists(st.lists(st.integers(0, 2), max_size=3), max_size=5))
def test_merging_by_parts_is_merging_at_once(batches):
    one = plan()
    segments = [rows_of(one, batch, warmed_at=float(i + 1)) for i, batch in enumerate(batches)]
    whole, parts = merge(segments), merge([merge(segments[:2]), *segments[2:]])
    assert dict(zip(whole.chunk_ids(), whole.warmed_at, strict=True)) == dict(
        zip(parts.chunk_ids(), parts.warmed_at, strict=True)
    )
    assert set(whole.chunk_ids()) <= {one.tree.chunk_id(i) for i in range(3)}


def test_a_running_lease_is_refused_and_an_expired_one_taken_over_with_a_higher_fence():
    first = claim(None, "a", now=0.0, ttl_s=10.0)
    assert first == LeaseRecord("a", 1, 10.0)
    assert claim(first, "b", now=9.0, ttl_s=10.0) is None
    second = claim(first, "b", now=10.0, ttl_s=10.0)
    assert second == LeaseRecord("b", 2, 20.0)
    assert renew(second, first, 11.0, 10.0) is None
    assert release(second, first) is None


def test_a_released_lease_keeps_its_fence():
    mine = LeaseRecord("a", 7, 10.0)
    free = release(renew(mine, mine, 5.0, 10.0), mine)
    assert free == LeaseRecord("a", 7, 0.0)
    assert claim(free, "b", 6.0, 10.0).fence == 8
