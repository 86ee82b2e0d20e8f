"""Prefetching on a replica that somebody names: which one, which prefixes. Loading them is `warmers/prefetch.py`."""

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from warmers.errors import EngineUnavailable, RequestError
from warmers.identity import require_daemon

if TYPE_CHECKING:
    from resources.lmcache import LmcacheDaemon
    from resources.workspace import Workspace
    from warmers.fleet import Fleet
    from warmers.prefetch import Loaded, Prefetched
    from warmers.prefixes import Prefix


def prefetch_into(
    workspace: "Workspace",
    fleet: "Fleet",
    daemon: str | None,
    labels: Sequence[str],
    on_event: Callable[[str], None],
) -> "Prefetched":
    """Load the prefixes of these labels, or all, into the daemon at an address, or the local replica's.

    Raises RequestError for a label that nobody knows, EngineUnavailable, EngineMismatch for another fleet's daemon.
    """
    from warmers.hot_set import HotSet
    from warmers.prefetch import prefetch

    done = 0
    with closing(_daemon(workspace, fleet, daemon)) as loader:
        require_daemon(fleet, loader.identity())
        hot = HotSet.of(fleet, _chosen(workspace, fleet, labels))

        def tell(loaded: "Loaded") -> None:
            nonlocal done
            done += 1
            on_event(
                f"{done} of {len(hot.prefixes)} prefixes: {loaded.label}, {loaded.in_l1} of {loaded.keys} keys in L1"
            )

        return prefetch(hot, loader, workspace.clock, fleet.limits.request_timeout_s, tell)


def _chosen(workspace: "Workspace", fleet: "Fleet", labels: Sequence[str]) -> list["Prefix"]:
    found = workspace.prefixes(fleet)
    known = {prefix.label: prefix for prefix in (found.prefixes if found else ())}
    unknown = [label for label in labels if label not in known]
    if unknown or not known:
        raise RequestError(
            f"prefetching {', '.join(unknown) or 'all prefixes'} of fleet {fleet.name!r}",
            seen=f"there is no such prefix; there are {', '.join(sorted(known)) or 'none'}",
            do="Correct the label, or run warmfront warm first.",
        )
    return [known[label] for label in dict.fromkeys(labels) or known]


def _daemon(workspace: "Workspace", fleet: "Fleet", url: str | None) -> "LmcacheDaemon":
    from resources.lmcache import LmcacheDaemon

    if url is not None:
        return LmcacheDaemon(url)
    replica = workspace.running(fleet)
    if replica is None:
        raise EngineUnavailable(
            f"prefetching for fleet {fleet.name!r}",
            seen="no replica of this fleet runs here",
            do="Start one (warmfront up), or name a replica by the address of its LMCache daemon (--daemon).",
        )
    replica.engine.close()
    return replica.daemon
