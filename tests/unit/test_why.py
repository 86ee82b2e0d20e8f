import numpy as np
from fakes import CHUNK, DictStore, make_fleet, make_prefix, words

from warmers.divergence import Captured
from warmers.ledger import Rows
from warmers.prefixes import RenderOptions
from warmers.why import explain


def asked(ids, salt="", model="m"):
    return Captured(model, None, RenderOptions(), salt, np.array(ids, np.uint32))


def why(request, *prefixes, store=None):
    return explain(request, prefixes, {}, make_fleet(), store or DictStore(), Rows.empty(), now=0.0)


def test_a_prefix_that_is_shorter_than_a_chunk_can_never_hit():
    short = make_prefix(words("a")[:10], "short")
    found = why(asked([*words("a")[:10], 1, 2]), short)
    assert (found.label, found.hit_tokens, found.chunks) == ("short", 0, ())
    assert "6 short of one chunk" in found.findings[0].what


def test_of_two_prefixes_the_one_that_is_followed_longer_is_the_nearest():
    base, longer = make_prefix(words("ab"), "base"), make_prefix(words("abcdef"), "longer")
    assert why(asked(words("abcdex")), base, longer).label == "longer"
    assert why(asked(words("abzz")), base, longer).label == "base"
    assert why(asked(words("abcdef")), base, longer).label == "longer"
    assert why(asked(words("zz")), base, longer).label is None
    salted = make_prefix(words("ab"), "salted", salt="s")
    assert why(asked(words("ab"), salt="s"), base, salted).label == "salted"


def test_hits_end_at_the_first_gap_and_where_the_request_leaves():
    fleet, store, prefix = make_fleet(), DictStore(), make_prefix(words("abcd"), "t")
    for chunk in why(asked(words("abcd")), prefix).chunks:
        store.put(chunk.key, b"x" * fleet.chunk_bytes)
    whole = why(asked([*words("abcd"), 5]), prefix, store=store)
    assert (whole.hit_tokens, whole.findings) == (4 * CHUNK, ())
    assert why(asked(words("abxd")), prefix, store=store).hit_tokens == 2 * CHUNK
    store.delete([whole.chunks[1].key])
    assert why(asked(words("abcd")), prefix, store=store).hit_tokens == CHUNK
