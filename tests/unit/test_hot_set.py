from dataclasses import replace

import numpy as np
from fakes import CHUNK, DictStore, make_fleet, make_prefix, words

from resources.hot_sets import decode, encode
from warmers.hot_set import HotSet, servable
from warmers.ledger import merge, rows_of
from warmers.plan import plan_warm
from warmers.presence import look

FLEET = make_fleet(tp=2, adapters={"sql": "1"})
PREFIXES = [
    make_prefix(words("abc"), "light"),
    make_prefix(words("abd"), "heavy", weight=3.0, salt="acme", adapter=FLEET.adapters[0]),
    make_prefix(words("a")[:5], "short"),
]


def test_it_says_all_that_loading_takes_and_comes_back_as_it_went():
    hot = HotSet.of(FLEET, PREFIXES)
    assert [(p.label, len(p.ids)) for p in hot.prefixes] == [("heavy", 3 * CHUNK), ("light", 3 * CHUNK)]
    assert hot.prefixes[0].key_salt == PREFIXES[1].key_salt
    assert (hot.chunk_bytes, hot.bytes) == (2 * FLEET.chunk_bytes, 12 * FLEET.chunk_bytes)
    back = decode(encode(hot))
    assert replace(back, prefixes=()) == replace(hot, prefixes=())
    for one, other in zip(hot.prefixes, back.prefixes, strict=True):
        assert np.array_equal(one.ids, other.ids)
        assert replace(one, ids=None) == replace(other, ids=None)


def test_the_heaviest_have_room_first():
    hot = HotSet.of(FLEET, PREFIXES)
    kept, left = hot.within(3 * hot.chunk_bytes)
    assert ([p.label for p in kept.prefixes], left) == (["heavy"], ("light",))


def test_what_is_proven_and_live_is_servable():
    prefixes = [make_prefix(words(text), text) for text in ("abc", "abd", "xyz")]
    prefixes.append(make_prefix(words("k"), "next.candidate"))
    plan = plan_warm(prefixes, FLEET, lambda tree: look(DictStore(), tree.names, 2, FLEET.chunk_bytes))
    every = range(len(plan.tree.hashes))
    proven = [chunk for label in (0, 2, 3) for chunk in plan.tree.paths[label].tolist()]
    ledger = merge([rows_of(plan, every, warmed_at=10.0), rows_of(plan, proven, proven_at=20.0)])
    assert [p.label for p in servable(prefixes, FLEET, ledger)] == ["abc", "xyz"]
    again = merge([ledger, rows_of(plan, plan.tree.paths[2].tolist(), warmed_at=30.0)])
    assert [p.label for p in servable(prefixes, FLEET, again)] == ["abc"], "warmed again since, and not proven yet"
    assert servable(prefixes, FLEET, rows_of(plan, [])) == []
