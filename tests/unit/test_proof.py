from dataclasses import replace

import pytest
from fakes import CHUNK, DictStore, FakeClock, FakeEngine, make_fleet, make_prefix, words

from warmers.errors import EngineRefused
from warmers.fleet import ProofFloors
from warmers.ledger import Rows, merge, rows_of
from warmers.observation import observe, sample_ids
from warmers.plan import plan_warm
from warmers.presence import look
from warmers.proof import choose, judge, proven_chunks
from warmers.templates import RenderOptions, Template


def scene(*texts, dtype="float32"):
    """A fleet whose prefixes are all warm in a store, and a fresh engine."""
    fleet = make_fleet(dtype=dtype)
    store = DictStore()
    engine = FakeEngine(fleet, store)
    prefixes = [make_prefix(words(text), text) for text in texts]
    for prefix in prefixes:
        engine.prefill(prefix.ids, None)
    fresh = FakeEngine(fleet, store)
    rendered = {prefix.label: prefix.rendered for prefix in prefixes}
    fresh.chat_ids = lambda messages, options, salt, adapter=None: rendered[messages[0]["content"]]
    return plan_of(prefixes, fleet, store), fresh, store


def plan_of(prefixes, fleet, store):
    return plan_warm(prefixes, fleet, lambda tree: look(store, tree.names, 1, fleet.chunk_bytes))


def templates_of(plan):
    options = RenderOptions()
    labels = [prefix.label for prefix in plan.prefixes]
    return {label: Template(label, None, "d", (({"role": "user", "content": label},),), options) for label in labels}


def labels(plan):
    return {prefix.label for prefix in plan.prefixes}


def proof_of(plan, engine, store, templates=None, floors=None):
    chosen = choose(plan, Rows.empty(), labels(plan))
    seen = observe(plan, chosen, templates or templates_of(plan), engine, store, FakeClock())
    return judge(seen, floors or plan.fleet.floors)


def test_warm_prefixes_are_proven_and_the_controls_leave_nothing_behind():
    plan, engine, store = scene("abcd", "abx")
    before = dict(store.values)
    proof = proof_of(plan, engine, store)
    assert proof.verdict == "proven"
    assert proof.hit_tokens == proof.expected_tokens == 7 * CHUNK
    assert proof.speedup == pytest.approx(10.0)
    assert store.values == before
    assert proven_chunks(plan, proof) == list(range(5))


def test_a_missing_chunk_fails_the_proof():
    plan, engine, store = scene("abcd")
    store.delete([plan.tree.names[2]])
    proof = proof_of(plan, engine, store, floors=ProofFloors())
    assert proof.verdict == "failed"
    assert "hit 32 of 64 tokens" in proof.reasons[0]
    assert proven_chunks(plan, proof) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kv_of_other_weights_fails_the_proof(dtype):
    plan, engine, store = scene("abcd", dtype=dtype)
    store.put(plan.tree.names[1], b"\1" * plan.fleet.chunk_bytes)
    proof = proof_of(plan, engine, store)
    assert proof.verdict == "failed"
    assert not proof.output_unchanged
    assert "other weights or layout" in proof.reasons[0]


def test_signals_that_disagree_are_inconclusive():
    plan, engine, store = scene("abcd")
    engine.lie_found = CHUNK
    proof = proof_of(plan, engine, store)
    assert proof.verdict == "inconclusive"
    assert "the two must agree" in proof.reasons[0]


def test_a_connector_that_fell_back_to_recompute_is_inconclusive():
    plan, engine, store = scene("abcd")
    engine.connector = ""
    proof = proof_of(plan, engine, store)
    assert proof.verdict == "inconclusive"
    assert "did not ask LMCache" in proof.reasons[0]


def test_a_connector_that_fell_back_for_a_moment_is_asked_again():
    plan, engine, store = scene("abcd")
    serve, served = engine._serve, []

    def fall_back_once(*asked):
        served.append(asked)
        engine.connector = "" if len(served) == 1 else "LMCacheMPConnector"
        return serve(*asked)

    engine._serve = fall_back_once
    proof = proof_of(plan, engine, store)
    assert (proof.verdict, proof.hit_tokens) == ("proven", 4 * CHUNK)


def test_without_a_fresh_engine_there_is_no_proof():
    plan, engine, store = scene("abcd")
    engine.fresh = False
    proof = proof_of(plan, engine, store)
    assert proof.verdict == "inconclusive"
    assert "newly started" in proof.reasons[0]


def test_nothing_to_prove_is_not_proven():
    plan, engine, store = scene()
    assert proof_of(plan, engine, store).verdict == "inconclusive"


def test_a_chat_request_with_other_ids_fails():
    plan, engine, store = scene("abcd")
    engine.chat_ids = lambda messages, options, salt, adapter=None: plan.prefixes[0].rendered + 1
    proof = proof_of(plan, engine, store)
    assert proof.verdict == "failed"
    assert "other token ids" in proof.reasons[0]


def test_in_16_bits_rounding_of_the_cold_run_is_told_from_other_kv():
    plan, engine, store = scene("abcd", dtype="bfloat16")
    seen = observe(plan, [0], templates_of(plan), engine, store, FakeClock()).prefixes[0]
    rounded = replace(seen.controls[0], answer=replace(seen.controls[0].answer, output=tuple(range(8))))
    from warmers.observation import Observations

    def verdict(dtype):
        observed = Observations("chat", "ns", dtype, True, (replace(seen, controls=(rounded,)),), (), 0.0)
        return judge(observed, ProofFloors()).verdict

    assert verdict("bfloat16") == "proven"
    assert verdict("float32") == "failed"


def test_unproven_prefixes_come_first_and_twins_once():
    plan, _, _ = scene("ab", "cdef", "ab", "x")
    assert [plan.prefixes[n].label for n in choose(plan, Rows.empty(), labels(plan))] == ["cdef", "ab", "x"]
    ledger = rows_of(plan, plan.tree.paths[1].tolist(), proven_at=5.0)
    assert [plan.prefixes[n].label for n in choose(plan, ledger, labels(plan))] == ["ab", "x", "cdef"]


def test_a_prefix_that_was_warmed_again_is_proven_again():
    plan, _, _ = scene("ab", "cd")
    both = merge(
        [
            rows_of(plan, range(4), warmed_at=1.0, proven_at=5.0),
            rows_of(plan, [plan.tree.paths[1][0]], warmed_at=9.0),
        ]
    )
    assert [plan.prefixes[n].label for n in choose(plan, both, labels(plan))] == ["cd", "ab"]


def test_a_prefix_that_is_not_whole_keeps_the_fleet_from_being_proven_and_harms_no_other():
    plan, engine, store = scene("abcd", "xy")
    store.delete([plan.tree.names[-1]])
    proof = proof_of(plan_of(plan.prefixes, plan.fleet, store), engine, store)
    assert (proof.verdict, [p.label for p in proof.prefixes]) == ("inconclusive", ["abcd"])
    assert "xy: 1 of its 2 chunks are not in L2; warm again" in proof.reasons


def test_a_prefix_that_the_engine_refuses_fails_alone():
    plan, engine, store = scene("abcd", "xy")
    generate, refused = engine.generate, words("xy")[0]

    def refuse(ids, **more):
        if ids[0] == refused:
            raise EngineRefused("POST", seen="HTTP 400: too long", do="Shorten it.")
        return generate(ids, **more)

    engine.generate = refuse
    proof = proof_of(plan, engine, store)
    assert (proof.verdict, [p.verdict for p in proof.prefixes]) == ("failed", ["proven"])
    assert "too long" in proof.reasons[0]


def test_answers_without_token_ids_prove_nothing():
    plan, engine, store = scene("abcd")
    generate = engine.generate
    engine.generate = lambda ids, **more: replace(generate(ids, **more), output=())
    assert proof_of(plan, engine, store).verdict == "inconclusive"
    plan, engine, store = scene("abcd")
    engine.chat_ids = lambda *_: None
    assert proof_of(plan, engine, store).verdict == "inconclusive"


def test_what_a_killed_proof_left_is_not_taken_for_cold_and_goes():
    plan, engine, store = scene("abcd")
    from warmers.keys import KeyLayout, chunk_keys
    from warmers.observation import CONTROL

    left = list(chunk_keys(sample_ids(plan.prefixes[0]), KeyLayout.of(plan.fleet), f"{CONTROL}0"))
    for name in left:
        store.put(name, bytes(plan.fleet.chunk_bytes))
    assert proof_of(plan, engine, store).verdict == "proven"
    assert (store.sizes(left) == -1).all()


def test_a_sample_asks_for_no_new_chunk():
    prefix = make_prefix(words("ab"), rendered=[*words("ab"), *range(200)])
    assert len(sample_ids(prefix)) == 2 * CHUNK + CHUNK - 1
    exact = make_prefix(words("ab"), rendered=words("ab"))
    assert len(sample_ids(exact)) == 2 * CHUNK + 1


def of_an_adapter(salting):
    """Plan, store and a fresh engine: the same text for the base model, an adapter, and a tenant of the adapter."""
    fleet, store = make_fleet(adapters={"sql": "1"}), DictStore()
    (sql,) = fleet.adapters
    asked = [{}, {"adapter": sql}, {"adapter": sql, "salt": "acme"}]
    prefixes = [make_prefix(words("abc"), str(number), **each) for number, each in enumerate(asked)]
    engine = FakeEngine(fleet, store, salting=salting)
    for prefix in prefixes:
        engine.prefill(prefix.ids, prefix.salt, prefix.adapter)
    fresh = FakeEngine(fleet, store, salting=salting)
    fresh.chat_ids = lambda *_: prefixes[0].rendered
    return plan_of(prefixes, fleet, store), fresh, store


def test_an_adapter_and_its_tenants_are_proven_by_keys_of_their_own():
    plan, engine, store = of_an_adapter(salting=True)
    before = dict(store.values)
    assert len(before) == len(plan.tree.names) == 9
    assert (proof_of(plan, engine, store).verdict, plan.missing_chunks) == ("proven", 0)
    assert store.values == before


def test_an_engine_that_gives_adapters_no_salt_is_never_proven():
    plan, engine, store = of_an_adapter(salting=False)
    assert plan.missing_chunks == 6
    everything = replace(plan, presence=replace(plan.presence, sizes=plan.presence.sizes * 0 + plan.fleet.chunk_bytes))
    changed = {p.label for p in proof_of(everything, engine, store).prefixes if not p.output_unchanged}
    assert changed == {"1"}  # it answers from the base model's KV
