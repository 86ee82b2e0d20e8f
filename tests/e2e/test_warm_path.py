"""The domain on real vLLM, real LMCache and real Valkey; the engine of fleet `chat` is shared by all tests here."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from engine_environment import needs_engine, sentences

from resources.model_files import render_chat
from resources.placeholders import CLOCKS
from warmers.errors import EngineMismatch, EngineRefused, EngineUnavailable
from warmers.identity import require_match
from warmers.keys import KeyLayout, chunk_keys
from warmers.ledger import unknown_chunks
from warmers.observation import observe
from warmers.prefixes import PrefixSet, mismatches
from warmers.proof import choose, judge
from warmers.warm import warm

pytestmark = [needs_engine, pytest.mark.fleet("chat")]


@pytest.fixture(scope="module")
def fleet(host):
    return host.fleet("chat")


@pytest.fixture(scope="module")
def replica(host, fleet):
    with host.replicas("chat").warmer(fleet) as replica:
        yield replica


@pytest.fixture(scope="module")
def store(host, replica):
    return host.store("chat")


@pytest.fixture(scope="module")
def prefixes(host, fleet, replica):
    return host.find_prefixes(fleet, host.templates(host.fleet("chat")), replica.engine)


def run_warm(host, fleet, replica, prefixes):
    plan = host.plan(fleet, prefixes)
    with host.lease(fleet.namespace) as fence:
        result = warm(plan, replica, host.store("chat"), host.state.journal(fleet.namespace), fence, host.clock)
    return plan, result


@pytest.fixture(scope="module")
def warmed(host, fleet, replica, prefixes):
    return run_warm(host, fleet, replica, prefixes)


def salted(prefixes, label, salt, ids=None):
    """One prefix under a salt of its own: a test's private copy."""
    (prefix,) = [p for p in prefixes.prefixes if p.label == label]
    return PrefixSet((replace(prefix, salt=salt, template=f"{label}-{salt}"),))


def test_the_engine_says_what_it_is(fleet, replica):
    require_match(fleet, replica.engine.identity(), replica.daemon_identity())
    other = replace(fleet, engine=replace(fleet.engine, dtype="bfloat16"))
    with pytest.raises(EngineMismatch, match="dtype is 'float32', not 'bfloat16'"):
        require_match(other, replica.engine.identity(), replica.daemon_identity())


def test_templates_sharing_a_start_are_found_to_share_it(prefixes):
    assert {p.label for p in prefixes.prefixes} == {"one", "two", "salted", "tools"}
    one, two = (next(p for p in prefixes.prefixes if p.label == label) for label in ("one", "two"))
    common = int((one.ids[: two.shared] == two.ids[: one.shared]).argmin())
    assert common > 2 * one.chunk_tokens


def test_every_path_of_the_engine_renders_alike(host, fleet, prefixes, replica):
    templates = host.templates(host.fleet("chat")).by_label()
    assert mismatches(prefixes.prefixes, templates, replica.engine) == ()
    for prefix in prefixes.prefixes:
        template = templates[prefix.label]
        chat = replica.chat_ids(template.renderings[1], template.options, "only-for-ids")
        assert np.array_equal(chat, replica.engine.render_for_chat(template.renderings[1], template.options))
        assert np.array_equal(chat[: prefix.shared], prefix.ids)


def test_our_own_rendering_of_the_chat_template_is_the_engines(host, fleet, replica):
    """It is used only to find where a chat template reads the clock."""
    for template in host.templates(host.fleet("chat")).templates:
        text = render_chat(fleet.model, template.renderings[0], template.options, CLOCKS[0])
        ids = replica.engine.render(template.renderings[0], template.options)
        assert np.array_equal(replica.engine.tokenize(text), ids)


def test_warming_computes_each_chunk_once_and_stores_it_under_the_predicted_keys(warmed, fleet, store):
    plan, result = warmed
    assert result.failed == ()
    assert result.chunks == plan.missing_chunks == len(plan.tree.hashes)
    assert result.computed_tokens <= plan.compute_tokens
    assert (store.sizes(plan.tree.names) == fleet.chunk_bytes).all()
    assert any(name.endswith("@tenant-7") for name in plan.tree.names)
    assert all(0 < ttl <= fleet.ttl_s for ttl in map(store.client.ttl, plan.tree.names))


def test_warming_again_computes_nothing(host, fleet, replica, prefixes, warmed):
    before = replica.counters()
    plan, result = run_warm(host, fleet, replica, prefixes)
    assert (result.requests, result.computed_tokens) == (0, 0)
    assert replica.counters() == before
    everything = range(len(plan.tree.hashes))
    assert unknown_chunks(plan.tree, everything, host.state.journal(fleet.namespace).rows()) == []


def test_a_cold_sample_hits_every_expected_token_by_both_counts(host, fleet, replica, prefixes, store, warmed):
    plan = host.plan(fleet, prefixes)
    held = set(store.client.scan_iter(f"{fleet.namespace}@*"))
    templates = host.templates(host.fleet("chat")).by_label()
    seen = observe(
        plan, choose(plan, host.state.journal("none").rows(), templates), templates, replica, store, host.clock
    )
    proof = judge(replace(seen, fresh=True), fleet.floors)
    assert proof.reasons == ()
    assert proof.hit_tokens == proof.expected_tokens == sum(p.full_tokens for p in prefixes.prefixes)
    assert proof.output_unchanged
    assert set(store.client.scan_iter(f"{fleet.namespace}@*")) == held


def warmfront(host, *arguments):
    """Exit code, and the JSON that it printed."""
    env = {**os.environ, "WARMFRONT_CONFIG": str(host.path)}
    argv = [sys.executable, "-m", "pipelines.cli", *arguments, "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, env=env)
    return done.returncode, json.loads(done.stdout)


def test_what_was_prefetched_is_hit_in_l1(host, fleet, replica, prefixes, store, warmed):
    host.state.save_prefixes("chat", prefixes, {})
    one, tenant = (next(p for p in prefixes.prefixes if p.label == label) for label in ("one", "salted"))
    replica.forget()
    code, done = warmfront(host, "prefetch", "one", "salted", "--fleet", "chat")
    keys = {p.label: {"label": p.label, "keys": p.chunks, "in_l1": p.chunks} for p in (one, tenant)}
    assert code == 0, done
    assert {row["label"]: row for row in done["loaded"]} == keys
    for prefix in (one, tenant):
        before = replica.counters()
        replica.generate(prefix.rendered, max_tokens=1, salt=prefix.salt or None)
        deadline = time.monotonic() + 10
        while (counted := replica.counters() - before).asked < prefix.full_tokens:
            assert time.monotonic() < deadline, counted
            time.sleep(0.05)
        assert (counted.found_l1, counted.found_l2) == (prefix.full_tokens, 0)


def test_what_cannot_be_prefetched_is_said(host, fleet, replica, prefixes, store, warmed):
    host.state.save_prefixes("chat", prefixes, {})
    mine = salted(prefixes, "one", "gone")
    host.state.save_prefixes("chat", mine, {})
    code, done = warmfront(host, "prefetch", "--fleet", "chat")
    assert (code, done["loaded"]) == (1, [{"label": "one-gone", "keys": mine.prefixes[0].chunks, "in_l1": 0}])
    host.state.save_prefixes("chat", prefixes, {})
    code, done = warmfront(host, "prefetch", "nobody", "--fleet", "chat")
    assert code == 2
    assert "prefetching nobody of fleet 'chat': there is no such prefix; there are one, salted" in done["error"]
    code, done = warmfront(host, "prefetch", "--fleet", "bare", "--daemon", replica.daemon.url)
    assert code == 1
    assert "LMCache's L2 key prefix or directory is" in done["error"]


def test_a_gap_and_a_wrong_size_are_repaired_at_the_cost_of_those_chunks_alone(
    host, fleet, replica, prefixes, store, warmed
):
    mine = salted(prefixes, "one", "gap")
    plan, _ = run_warm(host, fleet, replica, mine)
    names = plan.tree.names
    assert len(names) >= 5
    store.delete([names[1]])
    store.client.set(names[3], b"truncated")
    again, result = run_warm(host, fleet, replica, mine)
    assert [(step.start, step.end) for step in again.steps] == [(1, 2), (3, 4)]
    assert result.computed_tokens == 2 * fleet.engine.chunk_tokens
    assert (store.sizes(names) == fleet.chunk_bytes).all()


def test_a_missing_chunk_fails_the_proof(host, fleet, replica, prefixes, store, warmed):
    mine = salted(prefixes, "one", "hole")
    plan, _ = run_warm(host, fleet, replica, mine)
    store.delete([plan.tree.names[2]])
    seen = observe(plan, [0], {}, replica, store, host.clock)
    proof = judge(replace(seen, fresh=True), fleet.floors)
    assert (proof.verdict, proof.hit_tokens) == ("failed", 2 * fleet.engine.chunk_tokens)


def test_kv_that_does_not_belong_there_changes_the_answer_and_fails_the_proof(
    host, fleet, replica, prefixes, store, warmed
):
    mine = salted(prefixes, "one", "poison")
    plan, _ = run_warm(host, fleet, replica, mine)
    names = plan.tree.names
    for name in names[1:]:
        store.client.set(name, store.client.get(names[0]))
    seen = observe(plan, [0], {}, replica, store, host.clock)
    proof = judge(replace(seen, fresh=True), fleet.floors)
    assert proof.hit_tokens == proof.expected_tokens
    assert (proof.verdict, proof.output_unchanged) == ("failed", False)


KILLED = """
import sys
from pathlib import Path
from resources.workspace import Workspace
from dataclasses import replace
from warmers.prefixes import PrefixSet
from warmers.warm import warm
ws = Workspace(Path(sys.argv[1]), on_event=lambda m: None)
fleet = ws.fleet("chat")
fleet = replace(fleet, limits=replace(fleet.limits, concurrency=1))
with ws.replicas("chat").warmer(fleet) as replica:
    found = ws.find_prefixes(fleet, ws.templates(fleet), replica.engine)
    mine = PrefixSet(tuple(replace(p, salt="killed") for p in found.prefixes))
    plan = ws.plan(fleet, mine)
    with ws.lease(fleet.namespace) as fence:
        warm(plan, replica, ws.store("chat"), ws.state.journal(fleet.namespace), fence, ws.clock,
             lambda p: print(p.chunks, flush=True))
"""


def test_a_run_that_was_killed_is_continued_where_it_was(host, fleet, replica, prefixes, store, warmed):
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(host.path)], stdout=subprocess.PIPE, text=True)
    for line in child.stdout:
        if int(line) > 0:
            os.kill(child.pid, signal.SIGKILL)
            break
    child.communicate()
    mine = PrefixSet(tuple(replace(p, salt="killed") for p in prefixes.prefixes))
    plan, result = run_warm(host, fleet, replica, mine)  # waits until the dead holder's lease has had its time
    assert plan.presence.complete.any()
    assert 0 < result.computed_tokens <= plan.compute_tokens < len(plan.tree.hashes) * fleet.engine.chunk_tokens
    assert (store.sizes(plan.tree.names) == fleet.chunk_bytes).all()
    known = set(host.state.journal(fleet.namespace).rows().chunk_ids())
    assert {("killed", row.tobytes()) for row in plan.tree.hashes} <= known


def test_the_engine_refuses_and_is_missed_with_errors_that_say_so(replica):
    with pytest.raises(EngineRefused, match="maximum context length"):
        replica.engine.prefill(np.full(9000, 5, np.uint32), None)
    with closing(replace(replica.engine, model="other")) as other, pytest.raises(EngineRefused, match="serves tiny"):
        other.identity()
    gone = replace(replica.engine, url="http://127.0.0.1:1")
    with closing(gone), pytest.raises(EngineUnavailable, match=r"127\.0\.0\.1:1/"):
        gone.identity()
    hung = replace(replica.engine, request_timeout_s=0.001)
    with closing(hung), pytest.raises(EngineUnavailable, match="ReadTimeout"):
        hung.prefill(np.arange(10, 3000, dtype=np.uint32), "slow")


def test_keys_of_a_real_daemon_with_and_without_salt(host, fleet, replica, store):
    ids = np.arange(100, 100 + 2 * fleet.engine.chunk_tokens + 5, dtype=np.uint32)
    for salt in (None, "s-1"):
        replica.engine.prefill(ids, salt)
        names = list(chunk_keys(ids, KeyLayout.of(fleet), salt or ""))
        deadline = host.clock.now() + 20
        while not (store.sizes(names) == fleet.chunk_bytes).all():
            assert host.clock.now() < deadline, names
            host.clock.sleep(0.05)


def test_plan_is_the_same_by_the_command_line(host, warmed):
    done = subprocess.run(
        [sys.executable, "-m", "pipelines.cli", "plan", "--fleet", "chat", "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "WARMFRONT_CONFIG": str(host.path)},
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["compute_tokens"] == 0
    assert len(document["prefixes"]) == 4


def test_an_interrupt_exits_130_records_what_was_in_flight_and_releases_the_lease(host, fleet, replica, store):
    for number in range(8):
        (host.path.parent / "prompts" / f"late{number}.md").write_text(sentences(f"crate {number}", 120))
    child = subprocess.Popen(
        [sys.executable, "-m", "pipelines.cli", "warm", "--fleet", "chat", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "WARMFRONT_CONFIG": str(host.path)},
    )
    for line in child.stderr:
        if line.startswith("warmed") and not line.startswith("warmed 0"):
            child.send_signal(signal.SIGINT)
            break
    out, _ = child.communicate()
    assert child.returncode == 130
    assert "interrupted" in json.loads(out)["error"]
    with host.lease(fleet.namespace):
        pass
    plan = host.plan(fleet, host.state.prefixes("chat"))
    there = [int(chunk) for chunk in plan.presence.complete.nonzero()[0]]
    assert 0 < len(there) < len(plan.tree.hashes)
    assert unknown_chunks(plan.tree, there, host.state.journal(fleet.namespace).rows()) == []
