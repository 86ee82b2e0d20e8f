import numpy as np
import pytest
from fakes import CHUNK, DictStore, FakeEngine, make_fleet, make_prefix, words

from warmers.errors import TemplateError
from warmers.prefixes import Prefix, PrefixSet, common_start, find_prefix, find_prefixes, mismatches
from warmers.templates import Failed, RenderOptions, Template
from warmers.variations import Variation, varying_lines

LONG = "You are a helper of few words. " * 3


def template(*systems: str, name="t", users=("hello", "\nworld", "(x)"), **more) -> Template:
    renderings = tuple(
        ({"role": "system", "content": systems[i % len(systems)]}, {"role": "user", "content": user})
        for i, user in enumerate(users)
    )
    return Template(name, None, f"digest-{name}-{systems}", renderings, RenderOptions(), **more)


@pytest.fixture
def engine():
    return FakeEngine(make_fleet(), DictStore())


def test_common_start():
    one, two = np.array([1, 2, 3, 4]), np.array([1, 2, 9])
    assert common_start([one, two]) == 2
    assert common_start([one, one]) == 4
    assert common_start([one, np.array([], int)]) == 0


def test_the_prefix_is_what_every_rendering_starts_with(engine):
    prefix = find_prefix(template(LONG), engine, chunk_tokens=CHUNK, digest="d")
    text = "".join(map(chr, prefix.ids))
    assert text == f"<system>{LONG}</><user>"
    assert prefix.chunks == len(text) // CHUNK
    assert prefix.tail_tokens == len(text) % CHUNK
    assert prefix.unstable == ()


def test_a_date_in_the_system_prompt_ends_the_prefix_and_is_named(engine):
    systems = [f"{LONG}\nToday is {day}.\n{LONG * 3}" for day in ("Monday", "Sunday")]
    prefix = find_prefix(template(*systems), engine, chunk_tokens=CHUNK, digest="d")
    assert "".join(map(chr, prefix.ids)) == f"<system>{LONG}\nToday is "
    assert [v.where for v in prefix.unstable] == ["message 1 (system), line 2"]
    assert prefix.unstable[0].values == ("Today is Monday.", "Today is Sunday.")
    assert prefix.unstable[0].lost_chars >= len(LONG * 3)


def test_a_clock_in_the_chat_template_ends_the_prefix(engine):
    texts = tuple(f"<system>{LONG[:20]} at {hour} o'clock {LONG}" for hour in (9, 22))
    with pytest.raises(TemplateError, match="other token ids than the engine"):
        find_prefix(template("elsewhere"), engine, chunk_tokens=CHUNK, digest="d", clock_texts=lambda m, o: texts)
    prefix = find_prefix(
        template(LONG[:20] + " at 9 o'clock " + LONG * 9),
        engine,
        chunk_tokens=CHUNK,
        digest="d",
        clock_texts=lambda messages, options: texts,
    )
    assert "".join(map(chr, prefix.ids)) == f"<system>{LONG[:20]} at "
    assert "chat template's clock" in prefix.unstable[0].where


def test_what_varies_is_shown_where_it_varies():
    renderings = [[{"role": "system", "content": "x" * 300 + day}] for day in ("Monday", "Tuesday")]
    (variation,) = varying_lines(renderings)
    assert [value[-7:].lstrip("x") for value in variation.values] == ["Monday", "Tuesday"]
    assert all(len(value) <= 90 for value in variation.values)


def test_lines_of_unequal_number_stay_aligned_at_both_ends():
    renderings = [[{"role": "system", "content": f"a\n{middle}\nz\ny"}] for middle in ("1", "1\n2\n3")]
    assert varying_lines(renderings) == (Variation("message 1 (system), line 3", ("", "2\n3"), 4),)


def test_a_template_without_placeholders_is_one_rendering(engine):
    one = template(LONG, users=("always the same",) * 3)
    prefix = find_prefix(one, engine, chunk_tokens=CHUNK, digest="d")
    assert engine.renders == 1
    assert prefix.shared == len(prefix.rendered)


def find(templates, engine, last=None, max_model_len=1000, failed=()):
    return find_prefixes(
        templates,
        engine,
        chunk_tokens=CHUNK,
        max_model_len=max_model_len,
        digest_of=lambda t: t.digest,
        last=last or PrefixSet(),
        failed=failed,
    )


def test_short_and_failing_templates_are_reported_and_harm_no_other(engine):
    found = find([template(LONG, name="a"), template("x" * 2, "y", name="c")], engine)
    assert [p.label for p in found.prefixes] == ["a"]
    assert [(p.label, p.short_by) for p in found.too_short] == [("c", CHUNK - len("<system>"))]
    too_long = find([template(LONG * 40, name="big"), template(LONG, name="a")], engine, max_model_len=500)
    assert [p.label for p in too_long.prefixes] == ["a"]
    assert "context is 500" in too_long.failed[0].reason


def test_what_did_not_change_is_not_rendered_again_but_takes_the_new_salt(engine):
    first = find([template(LONG, name="a"), template(LONG * 2, name="b")], engine)
    before = engine.renders
    second = find([template(LONG, name="a", salt="s"), template(LONG * 2, name="b")], engine, first)
    assert engine.renders == before
    assert [p.salt for p in second.prefixes] == ["s", ""]


def test_what_is_broken_now_keeps_its_last_good_prefix(engine):
    sources = {"a": "a.yaml", "b": "b.yaml"}
    first = find([template(LONG, name=name, source=source) for name, source in sources.items()], engine)
    second = find([template(LONG, name="a", source="a.yaml")], engine, first, failed=[Failed("b.yaml", "?", "b.yaml")])
    assert [p.label for p in second.found] == ["a", "b"]
    too_long = template(LONG * 40, name="b", source="b.yaml")
    third = find([template(LONG, name="a", source="a.yaml"), too_long], engine, second, max_model_len=500)
    assert [p.label for p in third.found] == ["a", "b"]
    assert third.found[1].shared == first.found[1].shared
    assert [f.template for f in third.failed] == ["b"]
    gone = find([template(LONG, name="a", source="a.yaml")], engine, third)
    assert [p.label for p in gone.found] == ["a"]


def test_a_prefix_of_another_tokenizer_is_found(engine):
    one = template(LONG, name="a")
    prefix = find_prefix(one, engine, chunk_tokens=CHUNK, digest="d")
    stale = Prefix("a", None, "d", prefix.rendered + 1, prefix.shared, CHUNK)
    assert mismatches([prefix], {"a": one}, engine) == ()
    assert mismatches([stale], {"a": one}, engine) == ("a",)


def test_a_stored_prefix_is_asked_for_under_the_salt_that_its_adapter_has_now():
    (then,), (now,) = make_fleet(adapters={"sql": "1"}).adapters, make_fleet(adapters={"sql": "2"}).adapters
    found = PrefixSet((make_prefix(words("ab"), "base"), make_prefix(words("ab"), "sql", adapter=then)))
    assert [p.key_salt for p in found.under([now]).found] == ["", now.salt]
    assert [p.label for p in found.under([]).found] == ["base"], "nobody can ask for what is not served"
