"""L2 tiers other than the embedded Valkey: warmed, checked, damaged, repaired and proven on a real engine."""

import os
from dataclasses import replace

import pytest
from engine_environment import needs_engine
from valkey_servers import needs_tls

from warmers.identity import require_match
from warmers.keys import KeyLayout
from warmers.ledger import Rows
from warmers.observation import observe
from warmers.proof import choose, judge
from warmers.warm import warm

pytestmark = needs_engine


def truncate(store, key, size):
    os.truncate(store.directory / key, size)


def put(store, key, size):
    store.client.put_object(Bucket=store.bucket, Key=key, Body=bytes(size))


def set_value(store, key, size):
    store.client.set(key, bytes(size), keepttl=True)


@pytest.mark.parametrize(
    ("name", "resize"),
    [
        pytest.param("shared", truncate, marks=pytest.mark.fleet("shared")),
        pytest.param("bucket", put, marks=pytest.mark.fleet("bucket")),
        pytest.param("secure", set_value, marks=[pytest.mark.fleet("secure"), needs_tls]),
        pytest.param("plugin", set_value, marks=[pytest.mark.fleet("plugin"), needs_tls]),
    ],
)
def test_a_tier_is_warmed_repaired_and_proven(host, name, resize):
    fleet = host.fleet(name)
    with host.replicas(name).warmer(fleet) as replica, host.lease(fleet.namespace) as fence:
        require_match(fleet, replica.engine.identity(), replica.daemon_identity())
        store, journal = host.store(name), host.state.journal(fleet.namespace)
        store.require_writable(KeyLayout.of(fleet).start)
        found = host.find_prefixes(fleet, host.templates(fleet), replica.engine)
        plan = host.plan(fleet, found)
        assert warm(plan, replica, store, journal, fence, host.clock).failed == ()
        assert (store.sizes(plan.tree.names) == fleet.chunk_bytes).all()
        listed = {key for batch in store.names(KeyLayout.of(fleet).start) for key in batch}
        assert listed >= set(plan.tree.names)
        for size in (100, fleet.chunk_bytes + 1):  # LMCache takes a larger one, and replaces no file
            resize(store, plan.tree.names[0], size)
            broken = host.plan(fleet, found)
            assert broken.missing_chunks == 1
            assert warm(broken, replica, store, journal, fence, host.clock).computed_tokens == 256
            assert (store.sizes(plan.tree.names) == fleet.chunk_bytes).all()
        whole, templates = host.plan(fleet, found), host.templates(fleet).by_label()
        assert whole.missing_chunks == 0
        seen = observe(whole, choose(whole, Rows.empty(), templates)[:2], templates, replica, store, host.clock)
        proof = judge(replace(seen, fresh=True), fleet.floors)
        assert (proof.verdict, proof.reasons) == ("proven", ())
