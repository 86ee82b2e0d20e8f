from dataclasses import replace

import numpy as np
import pytest
from fakes import CHUNK, DictStore, make_fleet, make_prefix, words

from warmers.divergence import Captured, first_divergence
from warmers.keys import KeyLayout, chunk_keys
from warmers.ledger import Rows
from warmers.templates import RenderOptions, Template
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


def test_what_ends_the_hit_first_is_said_first():
    fleet, store, prefix = make_fleet(), DictStore(), make_prefix(words("abcd"), "t")
    names = [chunk.key for chunk in why(asked(words("abcd")), prefix).chunks]
    for name in names:
        store.put(name, b"x" * fleet.chunk_bytes)
    request = asked(words("abxd"))
    store.delete([names[3]])
    assert [f.what.split()[0] for f in why(request, prefix, store=store).findings] == ["it", "chunk"]
    store.delete([names[0]])
    found = why(request, prefix, store=store)
    assert [f.what.split()[0] for f in found.findings] == ["chunk", "it"]
    assert found.hit_tokens == 0
    other = why(asked(words("abxd"), salt="s"), prefix, store=store)
    assert [f.what.split()[1] for f in other.findings] == ["carries", "leaves"]


def test_another_model_hits_nothing_of_what_is_there():
    fleet, store, prefix = make_fleet(), DictStore(), make_prefix(words("ab"), "t")
    for chunk in why(asked(words("ab")), prefix).chunks:
        store.put(chunk.key, b"x" * fleet.chunk_bytes)
    assert why(asked(words("ab")), prefix, store=store).hit_tokens == 2 * CHUNK
    assert why(asked(words("ab"), model="other"), prefix, store=store).hit_tokens == 0


@pytest.mark.parametrize(("age", "state"), [(-1, "missing"), (0, "expired")])
def test_a_missing_chunk_has_expired_from_its_ttl_on(age, state):
    fleet, prefix = make_fleet(), make_prefix(words("a"), "t")
    digest = chunk_keys(prefix.ids, KeyLayout.of(fleet), "").hashes[:1]
    text, at = np.array([""], np.object_), np.array([100.0])
    rows = Rows(digest, text, np.array([1]), text, text, text, at, at, at)
    now = 100.0 + fleet.ttl_s + age
    found = explain(asked(words("a")), (prefix,), {}, fleet, DictStore(), rows, now=now)
    assert {chunk.state for chunk in found.chunks} == {state}


def chat(system, tools=None):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Where is it?"}]
    return Captured("m", messages, RenderOptions(tools), "", None)


def template(system, tools=None):
    asked = [[{"role": "system", "content": system}, {"role": "user", "content": text}] for text in ("One", "Two")]
    return Template("t", None, "d", asked, RenderOptions(tools))


@pytest.mark.parametrize(
    ("warmed", "sent", "where", "texts"),
    [
        ("Be kind.\nBye", "Be kind.\nBye\n", "line 2", ("Bye", "Bye\n")),
        ("Be kind.\nBye\n", "Be kind.\nBye", "line 2", ("Bye\n", "Bye")),
        ("Be kind.\nBye", "Be kind.\n\nBye", "line 2", ("Bye", "")),
        ("Be kind.\nBye", "be kind.\nBye", "line 1", ("Be kind.", "be kind.")),
    ],
)
def test_the_line_where_a_message_is_another(warmed, sent, where, texts):
    found = first_divergence(chat(sent), make_prefix(words("a")), template(warmed), None)
    assert found.where == f"message 1 (system), {where}"
    assert (found.warmed, found.request) == texts


def test_what_the_engine_puts_in_order_itself_makes_no_other_tool():
    parameters = {"type": "object", "properties": {"b": {}, "a": {}}}
    warmed = {"type": "function", "function": {"name": "f", "description": "d", "parameters": parameters}}
    sent = {"function": {"parameters": parameters, "strict": None, "description": "d", "name": "f"}}
    prefix = make_prefix(words("a"))
    assert first_divergence(chat("Hi", [sent]), prefix, template("Hi", [warmed]), None) is None
    sent["function"]["parameters"] = {"properties": {"b": {}, "a": {}}, "type": "object"}
    found = first_divergence(chat("Hi", [sent]), prefix, template("Hi", [warmed]), None)
    assert (found.where, "JSON differs" in found.do) == ("tool 1 (f)", True)


def test_a_date_that_passed_is_said():
    prefix = replace(make_prefix(words("ab")), turns_at=5.0)

    def advice(now):
        found = explain(asked(words("ax")), (prefix,), {}, make_fleet(), DictStore(), Rows.empty(), now=now)
        (leaves,) = [finding for finding in found.findings if "leaves the warmed prefix" in finding.what]
        return leaves.do

    assert "The date that was warmed has passed" in advice(now=6.0)
    assert "has passed" not in advice(now=4.0)


def test_nothing_was_warmed_yet():
    assert "nothing has been warmed" in why(asked(words("a"))).findings[0].what


def test_a_request_for_another_adapter_is_told_so():
    fleet, store = make_fleet(adapters={"sql": "1", "law": "1"}), DictStore()
    sql = fleet.adapter("sql")
    prefix = make_prefix(words("ab"), "t", adapter=sql)

    def explained(model):
        return explain(asked(words("ab"), model=model), [prefix], {}, fleet, store, Rows.empty(), now=0.0)

    for key in chunk_keys(prefix.ids, KeyLayout.of(fleet), sql.salt):
        store.put(key, b"x" * fleet.chunk_bytes)
    assert (explained("sql").hit_tokens, explained("sql").findings) == (2 * CHUNK, ())
    assert [(explained(model).hit_tokens, explained(model).findings[0].what[:20]) for model in ("law", "m")] == [
        (0, "it asks for the adap"),
        (0, "it asks for the base"),
    ]
    assert "it asks for model 'x'" in explained("x").findings[0].what
