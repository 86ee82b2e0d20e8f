"""Command lines and environments of a replica's two processes. Starting them belongs in `resources/replicas.py`."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from resources.local_stack import HOST
from resources.s3 import EMBEDDED_CREDENTIALS
from resources.settings import LocalSettings
from warmers.errors import ConfigError
from warmers.fleet import Fleet
from warmers.salts import Adapter

ENGINE_ENV = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache and /server_info; a serving pod never runs so
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "PYTHONHASHSEED": "0",
    "VLLM_LOGGING_COLOR": "0",
}
STREAMING = ("--load-format", "runai_streamer")
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Those that vLLM 0.32 takes for --max-lora-rank."""


@dataclass(frozen=True, slots=True)
class LocalWeights:
    """Where engines on this machine find a fleet's weights."""

    directory: Path | None = None
    """None: they stream a stage."""
    embedded: bool = False
    """Whether the stage is in the embedded stack's S3; elsewhere the environment says how to get there."""

    def environment(self, s3_url: str, assets_cache: str) -> dict[str, str]:
        """What an engine needs to stream. Path-style addresses wherever an endpoint is given: few others know more."""
        if self.directory is not None:
            return {}
        credentials = {name.upper(): value for name, value in EMBEDDED_CREDENTIALS.items()}
        embedded = (
            {"AWS_ENDPOINT_URL": s3_url, "AWS_DEFAULT_REGION": "us-east-1", **credentials} if self.embedded else {}
        )
        custom = {**os.environ, **embedded}.get("AWS_ENDPOINT_URL")
        path_style = {"RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0"} if custom else {}
        return {"VLLM_ASSETS_CACHE": assets_cache, **embedded, **path_style}


def daemon_argv(
    fleet: Fleet, settings: LocalSettings, url: str, adapter: Mapping[str, Any], zmq: int, shm: str
) -> list[str]:
    """LMCache's server, one for one namespace. `adapter`: of its L2; see resources/tiers.py."""
    return [
        str(settings.engine_python.with_name("lmcache")),
        *("server", "--host", HOST, "--port", str(zmq)),
        *("--http-host", HOST, "--http-port", str(urlsplit(url).port)),
        *("--chunk-size", str(fleet.engine.chunk_tokens), "--hash-algorithm", fleet.engine.hash_algorithm),
        *("--l1-size-gb", str(settings.l1_gb), "--eviction-policy", "LRU"),
        *("--supported-transfer-mode", "auto", "--shm-name", shm, "--metrics-sample-rate", "1.0"),
        *("--l2-adapter", json.dumps(adapter)),
    ]


def engine_argv(fleet: Fleet, settings: LocalSettings, url: str, zmq: int) -> list[str]:
    """VLLM's server; its connector finds the daemon at `zmq`."""
    connector = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "lmcache.mp.host": f"tcp://{HOST}",
            "lmcache.mp.port": zmq,
            # The interval is also the ping's time-out (lmcache 0.5.6). With the default of 10 s a daemon that
            # restarts faster hangs vLLM; with 1 s a busy daemon counts as gone, and requests are recomputed.
            "lmcache.mp.heartbeat_interval": 3.0,
        },
    }
    spec = fleet.engine
    parallel = ("--tensor-parallel-size", str(spec.tensor_parallel), "--distributed-executor-backend", "mp")
    return [
        str(settings.engine_python),
        *("-m", "vllm.entrypoints.openai.api_server", "--host", HOST, "--port", str(urlsplit(url).port)),
        *("--model", fleet.model.argument, "--served-model-name", fleet.model.served_name),
        *(STREAMING if fleet.model.stage_uri else ()),
        *("--dtype", spec.dtype, "--kv-cache-dtype", spec.kv_cache_dtype, "--block-size", str(spec.block_tokens)),
        *("--max-model-len", str(spec.max_model_len), "--enforce-eager", "--enable-prompt-tokens-details"),
        *("--enable-scale-out", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *(parallel if spec.tensor_parallel > 1 else ()),
        *(adapter_argv(fleet.adapters) if fleet.adapters else ()),
        *("--kv-transfer-config", json.dumps(connector)),
    ]


def adapter_argv(adapters: Sequence[Adapter]) -> list[str]:
    """For LoRA adapters, all of them in one batch, each with its own KV. Raises ConfigError for too high a rank."""
    highest = max(adapters, key=lambda adapter: adapter.rank)
    rank = next((rank for rank in LORA_RANKS if rank >= highest.rank), None)
    if rank is None:
        raise ConfigError(
            f"serving LoRA adapter {highest.name!r}",
            seen=f"its rank is {highest.rank}, and vLLM takes {LORA_RANKS[-1]} at most",
            do="Train one of a lower rank.",
        )
    modules = [json.dumps({"name": adapter.name, "path": adapter.path}) for adapter in adapters]
    return [
        *("--enable-lora", "--max-loras", str(len(adapters)), "--max-lora-rank", str(rank)),
        *("--lora-modules", *modules, "--middleware", "warmfront_engine.salts.CacheSalts"),
    ]
