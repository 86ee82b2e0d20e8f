"""The LMCache daemon over HTTP: what it says of itself, its counters, filling and dropping L1."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

from resources.http_service import HttpService
from resources.metrics import read_metrics, total
from warmers.errors import EngineRefused, EngineUnavailable
from warmers.hot_set import HotPrefix, HotSet
from warmers.identity import DaemonIdentity
from warmers.replica import StoreCounts


@dataclass(frozen=True)
class LmcacheDaemon:
    """One `lmcache server`."""

    url: str

    @cached_property
    def http(self) -> HttpService:
        return HttpService(self.url, "the LMCache daemon")

    def close(self) -> None:
        """Close its connections."""
        self.http.close()

    def identity(self) -> DaemonIdentity:
        """From /lmc_version and /status."""
        status = self.http.json("GET", "/status")
        contexts = (status.get("cache_context_meta") or {}) | (status.get("non_cuda_context_meta") or {})
        adapters = status["storage_manager"]["l2_adapters"]
        return DaemonIdentity(
            lmcache=str(self.http.json("GET", "/lmc_version")).partition("-")[0],
            chunk_tokens=status["chunk_size"],
            hash_algorithm=status["hash_algorithm"],
            namespaces=tuple(_namespace(adapter) for adapter in adapters),
            engines=tuple(sorted({str(context["model_name"]) for context in contexts.values()})),
        )

    def forget(self) -> None:
        """POST /cache/clear: drop L1."""
        self.http.call("POST", "/cache/clear")

    def l1_bytes(self) -> int:
        """From /status: what every L1 of it may take."""
        sizes = self.http.json("GET", "/status")["storage_manager"]["l1_capacity_bytes_by_backend"]
        return sum(int(size) for size in sizes.values())

    def prefetch(self, hot: HotSet, prefix: HotPrefix) -> str:
        """POST /cache/prefetches. LMCache finds the keys itself, of every rank."""
        body = {
            "model_name": hot.model_path,
            "world_size": hot.world_size,
            "token_ids": prefix.ids.tolist(),
            "cache_salt": prefix.key_salt,
        }
        return str(self.http.json("POST", "/cache/prefetches", body)["request_id"])

    def prefetched(self, request: str) -> tuple[int, int] | None:
        """GET /cache/prefetches/{id}, which answers once."""
        try:
            answer = self.http.json("GET", f"/cache/prefetches/{request}")
        except EngineRefused as refused:
            if "unknown prefetch" not in refused.seen:
                raise
            do = "It was restarted in between: run it again."
            raise EngineUnavailable(refused.attempted, seen=refused.seen, do=do) from refused
        if answer["status"] == "pending":
            return None
        return int(answer["found_keys"]), int(answer["total_keys"])

    def healthy(self) -> bool:
        """Whether /healthcheck answers."""
        try:
            self.http.call("GET", "/healthcheck")
        except (EngineRefused, EngineUnavailable):
            return False
        return True

    def lookups(self) -> dict[str, int]:
        """Tokens looked up and found since start: asked, found_l1, found_l2."""
        samples = read_metrics(self.http.call("GET", "/metrics").text)
        names = {"asked": "requested", "found_l1": "hit_l1", "found_l2": "hit_l2"}
        return {key: total(samples, f"lmcache_mp_lookup_{name}_tokens_total") for key, name in names.items()}

    def stores(self) -> StoreCounts:
        """Chunks it meant to write to L2 since start, and those that arrived."""
        samples = read_metrics(self.http.call("GET", "/metrics").text)
        submitted, completed = (
            total(samples, f"lmcache_mp_l2_store_{name}_objects_chunks_total") for name in ("submitted", "completed")
        )
        return StoreCounts(submitted, completed)


def _namespace(adapter: Mapping[str, Any]) -> str:
    return str(adapter.get("key_prefix") or PurePosixPath(str(adapter.get("base_path", ""))).name)
