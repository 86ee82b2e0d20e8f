"""What a fleet has in L2 and what becomes of it: the domain's decisions on the workspace's adapters.

What is decided belongs in `warmers/inventory.py` and `warmers/life.py`.
"""

from dataclasses import dataclass
from functools import cached_property

from resources.workspace import PROOFS, Workspace
from warmers.fleet import Fleet
from warmers.inventory import Holding, Inventory, look_into, take_stock
from warmers.keys import KeyLayout
from warmers.lease import Fence
from warmers.ledger import ChunkId
from warmers.life import (
    LifePlan,
    LifeResult,
    NamespaceDecision,
    NamespaceRecord,
    carry_out_life,
    chunks_of,
    decide_namespaces,
    plan_life,
    remove_lapsed,
    remove_namespace,
)
from warmers.prefixes import PrefixSet
from warmers.presence import KVStore


@dataclass(frozen=True)
class Holdings:
    """Of one fleet, in its present namespace unless it says otherwise."""

    workspace: Workspace
    fleet: Fleet

    @cached_property
    def store(self) -> KVStore:
        """The fleet's L2."""
        return self.workspace.store(self.fleet.name)

    @property
    def grace_s(self) -> float:
        """For which what nobody needs stays."""
        return self.workspace.fleet_settings(self.fleet.name).l2.grace_s

    def look(self) -> Holding:
        """What L2 has of the ledger's chunks, row by row."""
        return look_into(self.store, self.workspace.state.journal(self.fleet.namespace).rows(), self.fleet)

    def inventory(self) -> Inventory:
        """The same, counted, and by prefix; and how full L2 is."""
        state, name = self.workspace.state, self.fleet.name
        last = state.latest(name, "inventory") or {}
        held, usage, now = self.look(), self.store.usage(), self.workspace.clock.now()
        found = self.workspace.prefixes(self.fleet) or PrefixSet()
        return take_stock(held, found.prefixes, self.fleet, usage, last.get("evicted_keys"), now)

    def needed(self) -> frozenset[ChunkId]:
        """What the current prefixes are made of; they are read again whenever there are others."""
        path = (self.workspace.state.latest(self.fleet.name, "prefixes") or {}).get("path", "")
        if path not in self._needed:
            found = self.workspace.prefixes(self.fleet)
            self._needed.clear()
            self._needed[path] = chunks_of(found.prefixes if found else (), self.fleet)
        return self._needed[path]

    @cached_property
    def _needed(self) -> dict[str, frozenset[ChunkId]]:
        """By where the prefixes are."""
        return {}

    def plan_life(self) -> LifePlan:
        """What is to happen to the ledger's chunks."""
        return plan_life(self.look(), self.needed(), self.fleet, self.grace_s, self.workspace.clock.now())

    def carry_out(self, plan: LifePlan, fence: Fence, *, apply: bool) -> LifeResult:
        """Extend; with `apply` remove as well. Call under the namespace's lease."""
        journal, now = self.workspace.state.journal(self.fleet.namespace), self.workspace.clock.now()
        return carry_out_life(plan, self.fleet, self.store, journal, fence, self.needed, now, apply=apply)

    def remove_lapsed(self, fence: Fence, *, apply: bool) -> int:
        """Remove what a shared file system should have forgotten by now; how many that is."""
        if self.fleet.store != "fs" or self.fleet.ttl_s is None:
            return 0
        return remove_lapsed(KeyLayout.of(self.fleet), self.needed, self.store, fence, apply=apply)

    def note_namespace(self) -> None:
        """Remember that the fleet is warmed in this one, for the day when it has another."""
        place = self.workspace.tier(self.fleet.name).place
        record = NamespaceRecord(self.fleet.namespace, KeyLayout.of(self.fleet).start, place)
        self.workspace.state.save_namespace(self.fleet.name, record)

    def namespaces(self) -> list[NamespaceDecision]:
        """What is to happen to each namespace that the fleet was warmed in."""
        records, place = self.workspace.state.namespaces(self.fleet.name), self.workspace.tier(self.fleet.name).place
        return decide_namespaces(records, self._namespaces_needed(), place, self.grace_s, self.workspace.clock.now())

    def retire_namespaces(self, *, apply: bool) -> list[NamespaceDecision]:
        """Remember since when each is superseded; with `apply` remove those whose grace is over."""
        decided = self.namespaces()
        for decision in decided:
            self.workspace.state.save_namespace(self.fleet.name, decision.record)
            if apply and decision.remove:
                self._remove(decision.record)
        return decided

    def _remove(self, record: NamespaceRecord) -> None:
        """Whole, under its lease, unless somebody needs it again by now."""
        with self.workspace.lease(record.name) as fence:
            removed = remove_namespace(record, self.store, fence, lambda: record.name in self._namespaces_needed())
            if removed is not None:
                self.workspace.state.drop_namespace(self.fleet.name, record.name)
        said = "stays: somebody needs it again" if removed is None else f"is removed, {removed:,} keys"
        self.workspace.on_event(f"{record.name} {said}")

    def _namespaces_needed(self) -> dict[str, str]:
        """By name, who needs it."""
        needed = {self.workspace.fleet(self.fleet.name).namespace: "the fleet is warmed in it"}
        for kind in PROOFS:
            name = (self.workspace.state.latest(self.fleet.name, kind) or {}).get("namespace")
            if name is not None:
                needed.setdefault(name, f"the fleet was last {PROOFS[kind]} in it")
        return needed
