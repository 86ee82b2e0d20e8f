"""What nobody needs any more, of a fleet's L2 and of its model's stages: for `warmfront retain`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resources.workspace import Workspace
    from warmers.life import LifePlan, NamespaceDecision
    from warmers.retention import Decision


@dataclass(frozen=True, slots=True)
class Retention:
    """What is to happen to each."""

    stages: "Sequence[Decision]"
    namespaces: "Sequence[NamespaceDecision]" = ()
    chunks: "LifePlan | None" = None
    """Of the present namespace; None before the model is staged, when there is none."""

    @property
    def going(self) -> frozenset[str]:
        """Stages and namespaces that are to be removed."""
        stages = {decision.digest for decision in self.stages if decision.remove}
        return frozenset(stages | {decision.record.name for decision in self.namespaces if decision.remove})

    def document(self, left: "Retention | None") -> dict[str, Any]:
        """As JSON. `left`: the same after a removal; None: nothing was removed."""
        gone = self.going - left.going if left else frozenset()
        document: dict[str, Any] = {
            "stages": [asdict(d) | {"removed": d.digest in gone} for d in self.stages],
            "namespaces": [
                {"name": d.record.name, "remove": d.remove, "why": d.why, "removed": d.record.name in gone}
                for d in self.namespaces
            ],
        }
        if self.chunks is not None:
            rest = len(left.chunks.remove) if left and left.chunks else len(self.chunks.remove)
            document["chunks"] = {
                "total": len(self.chunks.rows),
                "needed": int(self.chunks.needed.sum()),
                "remove": len(self.chunks.remove),
                "remove_bytes": self.chunks.remove_bytes,
                "removed": len(self.chunks.remove) - rest,
                "by_template": [
                    {"template": template, "chunks": count, "bytes": size}
                    for template, count, size in self.chunks.removed_by_template()
                ],
            }
        return document


def decide(workspace: "Workspace", name: str) -> Retention:
    """Decide for one fleet; changes nothing, but starts the embedded stores. Raises StoreUnavailable."""
    settings = workspace.fleet_settings(name)
    decided: Sequence[Decision] = ()
    if workspace.keeps_stages(name):
        stages = workspace.open_stages()
        decided = workspace.decide_weights(name)
        if settings.model.source is not None and stages.current(settings.model.name) is None:
            return Retention(decided)
    with workspace.stack.processes.locked():
        workspace.tier(name).ensure()
    holdings = workspace.holdings(workspace.fleet(name))
    return Retention(decided, holdings.namespaces(), holdings.plan_life())
