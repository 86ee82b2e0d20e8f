from fakes import CHUNK, DictStore, make_fleet, make_prefix, words
from hypothesis import given
from hypothesis import strategies as st

from warmers.fleet import WarmLimits
from warmers.plan import plan_warm
from warmers.presence import look


def plan_of(texts, present=(), tp=1, cap=None, weights=None):
    """`present`: chunks in L2 on every rank, named by the text up to and including them."""
    fleet = make_fleet(tp=tp, limits=WarmLimits(max_tokens_per_run=cap))
    weights = weights or [1.0] * len(texts)
    prefixes = [make_prefix(words(t), label=t, weight=w) for t, w in zip(texts, weights, strict=True)]
    store = DictStore()

    def look_up(tree):
        for text in present:
            for path, whole in zip(tree.paths, texts, strict=True):
                if whole.startswith(text):
                    for name in tree.names_of([path[len(text) - 1]]):
                        store.put(name, bytes(fleet.chunk_bytes))
        return look(store, tree.names, tp, fleet.chunk_bytes)

    return plan_warm(prefixes, fleet, look_up), store


def steps(plan):
    return [(plan.prefixes[s.prefix].label, s.start, s.end, s.after) for s in plan.steps]


def test_a_shared_parent_is_computed_once_and_first():
    plan, _ = plan_of(["abcd", "abx", "q"])
    assert steps(plan) == [("abcd", 0, 4, None), ("abx", 2, 3, 0), ("q", 0, 1, None)]
    assert plan.compute_tokens == 6 * CHUNK


def test_what_is_there_is_not_planned():
    plan, _ = plan_of(["abcd", "abx"], present=["a", "ab", "abc", "abcd", "abx"])
    assert plan.steps == ()
    assert plan.compute_tokens == 0


def test_a_gap_is_filled_without_computing_what_stands_behind_it():
    plan, _ = plan_of(["abcde"], present=["a", "abc", "abcd"])
    assert steps(plan) == [("abcde", 1, 2, None), ("abcde", 4, 5, 0)]


def test_a_missing_rank_or_a_wrong_size_is_missing():
    plan, store = plan_of(["ab"], present=["a", "ab"], tp=2)
    assert plan.steps == ()
    names = plan.tree.names
    store.delete([names[1]])
    store.put(names[2], b"short")
    again = plan_warm(plan.prefixes, plan.fleet, lambda tree: look(store, tree.names, 2, plan.fleet.chunk_bytes))
    assert steps(again) == [("ab", 0, 2, None)]
    assert again.presence.wrong.tolist() == [[False, False], [True, False]]


def test_two_templates_with_one_prefix_are_one_piece_of_work():
    plan, _ = plan_of(["abc", "abc"])
    assert steps(plan) == [("abc", 0, 3, None)]
    assert [row.same_as for row in plan.rows()] == [None, "abc"]


def test_the_cap_defers_and_cuts_at_a_chunk():
    plan, _ = plan_of(["abcd", "q"], cap=3 * CHUNK + 5)
    assert steps(plan) == [("abcd", 0, 3, None)]
    assert plan.deferred_chunks == 2


def test_heavy_subtrees_come_first_and_siblings_together():
    plan, _ = plan_of(["ax", "q", "ay"], weights=[1.0, 2.0, 5.0])
    assert [label for label, *_ in steps(plan)] == ["ax", "ay", "q"]


def test_salts_do_not_share():
    fleet = make_fleet()
    prefixes = [make_prefix(words("ab"), "one"), make_prefix(words("ab"), "two", salt="s")]
    store = DictStore()
    plan = plan_warm(prefixes, fleet, lambda tree: look(store, tree.names, 1, fleet.chunk_bytes))
    assert plan.missing_chunks == 4
    assert plan.tree.names[2].endswith("@s")


@given(st.lists(st.text("ab", max_size=6), max_size=6), st.data())
def test_steps_compute_every_missing_chunk_once_and_find_their_start_in_place(texts, data):
    texts = [t for t in texts if t]
    every = sorted({t[: i + 1] for t in texts for i in range(len(t))})
    present = data.draw(st.sets(st.sampled_from(every))) if every else set()
    plan, _ = plan_of(texts, present=sorted(present))
    there = set(present)
    for number, step in enumerate(plan.steps):
        text = plan.prefixes[step.prefix].label
        assert step.after is None or step.after < number
        assert all(text[: i + 1] in there for i in range(step.start))
        computed = {text[: i + 1] for i in range(step.start, step.end)}
        assert not computed & there
        there |= computed
    assert there == set(every)


@given(st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=6))
def test_a_step_depends_on_whatever_computes_what_stands_before_it(texts):
    plan, _ = plan_of(texts)
    done_by = {}
    for number, step in enumerate(plan.steps):
        text, ancestors, at = plan.prefixes[step.prefix].label, set(), step.after
        while at is not None:
            ancestors.add(at)
            at = plan.steps[at].after
        assert {done_by[text[: i + 1]] for i in range(step.start)} <= ancestors
        done_by |= {text[: i + 1]: number for i in range(step.start, step.end)}


def test_no_prefix_no_plan():
    fleet = make_fleet()
    plan = plan_warm([], fleet, lambda tree: look(DictStore(), tree.names, 1, fleet.chunk_bytes))
    assert plan.steps == ()
    assert plan.missing_chunks == 0
    assert plan.tree.hashes.shape == (0, 32)
