"""Engines that are not the plain one: two ranks, and one without its connector."""

from dataclasses import replace

import pytest
from engine_environment import needs_engine

from resources.replica_commands import engine_argv
from warmers.errors import EngineMismatch, NotWarm
from warmers.identity import require_match
from warmers.ledger import Rows
from warmers.observation import observe
from warmers.proof import choose, judge
from warmers.warm import warm

pytestmark = needs_engine


@pytest.mark.fleet("tp2")
def test_two_ranks_are_warmed_checked_and_proven(host):
    fleet = host.fleet("tp2")
    with host.replicas("tp2").warmer(fleet) as replica:
        require_match(fleet, replica.engine.identity(), replica.daemon_identity())
        store, journal = host.store("tp2"), host.state.journal(fleet.namespace)
        found = host.find_prefixes(fleet, host.templates(fleet), replica.engine)
        plan = host.plan(fleet, found)
        with host.lease(fleet.namespace) as fence:
            result = warm(plan, replica, store, journal, fence, host.clock)
            assert result.failed == ()
            assert len(plan.tree.names) == 2 * len(plan.tree.hashes)
            assert (store.sizes(plan.tree.names) == fleet.chunk_bytes).all()
            lost = plan.tree.names[2 * plan.tree.paths[0][1] + 1]
            assert "@02010201@" in lost
            store.delete([lost])
            broken = host.plan(fleet, found)
            assert broken.missing_chunks == 1
            assert warm(broken, replica, store, journal, fence, host.clock).computed_tokens == 256
            store.delete([lost])
            short = judge(replace(observe(plan, [0], {}, replica, store, host.clock), fresh=True), fleet.floors)
            assert (short.verdict, short.hit_tokens) == ("failed", fleet.engine.chunk_tokens)
            warm(host.plan(fleet, found), replica, store, journal, fence, host.clock)
        whole = host.plan(fleet, found)
        templates = host.templates(fleet).by_label()
        seen = observe(whole, choose(whole, Rows.empty(), templates)[:2], templates, replica, store, host.clock)
        proof = judge(replace(seen, fresh=True), fleet.floors)
        assert (proof.verdict, proof.reasons) == ("proven", ())


def without_connector(*arguments):
    argv = engine_argv(*arguments)
    at = argv.index("--kv-transfer-config")
    return argv[:at] + argv[at + 2 :]


@pytest.mark.fleet("bare")
def test_an_engine_that_stores_nothing_is_recognised(host, monkeypatch):
    monkeypatch.setattr("resources.replicas.engine_argv", without_connector)
    fleet = host.fleet("bare")
    with host.replicas("bare").warmer(fleet) as replica:
        with pytest.raises(EngineMismatch, match="without a KV connector"):
            require_match(fleet, replica.engine.identity(), replica.daemon_identity())
        found = host.find_prefixes(fleet, host.templates(fleet), replica.engine)
        plan = host.plan(fleet, found)
        assert plan.missing_chunks
        journal = host.state.journal(fleet.namespace)
        with host.lease(fleet.namespace) as fence, pytest.raises(NotWarm, match="asked to store nothing"):
            warm(plan, replica, host.store("bare"), journal, fence, host.clock)
        seen = observe(plan, [0], {}, replica, host.store("bare"), host.clock)
        proof = judge(replace(seen, fresh=True), fleet.floors)
        assert proof.verdict == "inconclusive"
        assert "did not ask LMCache" in proof.reasons[0]
