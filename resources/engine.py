"""vLLM over HTTP: rendering, prefill, streamed answers, what it says of itself, its counters."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from resources.http_service import HttpService
from resources.metrics import read_metrics, total
from warmers.errors import EngineLost, EngineRefused, EngineUnavailable
from warmers.identity import EngineIdentity
from warmers.keys import TokenIds
from warmers.prefixes import Usage
from warmers.replica import Generation
from warmers.templates import Messages, RenderOptions

SALT_TABLE_HEADER = "x-warmfront-salts"
"""By which the engine's middleware says what table it has in force."""
FORGET_AGAIN_S = 0.2
FORGET_DEADLINE_S = 30.0
"""vLLM keeps blocks that a connector is still storing, and says so: how long to ask again."""


@dataclass(frozen=True)
class VllmEngine:
    """One vLLM server. Satisfies warmers.prefixes.Engine."""

    url: str
    model: str
    """--served-model-name."""
    request_timeout_s: float = 300.0
    http: HttpService = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "http", HttpService(self.url, "vLLM", self.request_timeout_s))

    def close(self) -> None:
        """Close its connections."""
        self.http.close()

    def render(self, messages: Messages, options: RenderOptions) -> TokenIds:
        """POST /tokenize with messages: the chat template applied."""
        return _ids(self.http.json("POST", "/tokenize", self._chat(messages, options))["tokens"])

    def render_for_chat(self, messages: Messages, options: RenderOptions) -> TokenIds | None:
        """POST /v1/chat/completions/render: the chat endpoint's own path; None where it is not enabled."""
        try:
            answer = self.http.json("POST", "/v1/chat/completions/render", self._chat(messages, options))
        except EngineRefused as refused:
            if "HTTP 403" in refused.seen or "HTTP 404" in refused.seen:
                return None
            raise
        return _ids(answer["token_ids"])

    def tokenize(self, text: str, *, special_tokens: bool = False) -> TokenIds:
        """POST /tokenize with a text."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": special_tokens}
        return _ids(self.http.json("POST", "/tokenize", body)["tokens"])

    def prefill(self, ids: TokenIds, salt: str | None, adapter: str | None = None) -> Usage:
        """POST /v1/completions for one token."""
        answer = self.http.json("POST", "/v1/completions", self._completion(ids, 1, salt, adapter))
        usage = answer["usage"]
        return Usage(usage["prompt_tokens"], _cached(usage))

    def generate(
        self, ids: TokenIds, *, max_tokens: int, salt: str | None = None, adapter: str | None = None
    ) -> Generation:
        """Stream a greedy completion; TTFT is the time to the first chunk with a token in it."""
        import json

        import httpx

        body = self._completion(ids, max_tokens, salt, adapter) | {
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "ignore_eos": True,
        }
        output: list[int] = []
        usage: dict[str, Any] = {}
        started, first = time.perf_counter(), 0.0
        try:
            with self.http.client.stream("POST", "/v1/completions", json=body) as answer:
                if not answer.is_success:
                    answer.read()
                    self.http.require_success(answer, "POST", "/v1/completions")
                for line in answer.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise EngineUnavailable(
                            f"POST {self.url}/v1/completions, streaming",
                            seen=str(event["error"])[:500],
                            do="Look at the engine's log; try again.",
                        )
                    usage = event.get("usage") or usage
                    for choice in event.get("choices", ()):
                        output += choice.get("token_ids") or ()
                    if output and not first:
                        first = time.perf_counter() - started
        except httpx.HTTPError as error:
            raise self.http.lost("POST", "/v1/completions", error) from error
        return Generation(tuple(output), first, usage.get("prompt_tokens", 0), _cached(usage))

    def chat_ids(
        self, messages: Messages, options: RenderOptions, salt: str | None = None, adapter: str | None = None
    ) -> TokenIds | None:
        """The prompt ids that a chat request for one token was served with."""
        body = self._chat(messages, options) | {"max_tokens": 1, "temperature": 0, "return_token_ids": True}
        if adapter:
            body["model"] = adapter
        if salt:
            body["cache_salt"] = salt
        ids = self.http.json("POST", "/v1/chat/completions", body).get("prompt_token_ids")
        return None if ids is None else _ids(ids)

    def identity(self) -> EngineIdentity:
        """From /v1/models, /version and, in development mode, /server_info."""
        listed = self.http.call("GET", "/v1/models")
        models = {entry["id"]: entry for entry in listed.json()["data"]}
        if self.model not in models:
            raise EngineRefused(
                f"asking vLLM at {self.url} for model {self.model!r}",
                seen=f"it serves {', '.join(sorted(models)) or 'none'}",
                do="Correct model.name in warmfront.yaml or --served-model-name.",
            )
        entry = models[self.model]
        config = self._config()
        return EngineIdentity(
            model_path=entry["root"],
            vllm=self.http.json("GET", "/version")["version"],
            max_model_len=entry["max_model_len"],
            dtype=_get(config, "model_config", "dtype", strip="torch."),
            block_tokens=_get(config, "cache_config", "block_size"),
            tensor_parallel=_get(config, "parallel_config", "tensor_parallel_size"),
            kv_cache_dtype=_get(config, "cache_config", "cache_dtype"),
            connector=(_get(config, "kv_transfer_config", "kv_connector") or "") if config else None,
            adapters=tuple(sorted(name for name, served in models.items() if served.get("parent"))),
            salt_table=listed.headers.get(SALT_TABLE_HEADER),
        )

    def _config(self) -> dict[str, Any]:
        try:
            config = self.http.json("GET", "/server_info?config_format=json").get("vllm_config")
        except EngineRefused:
            return {}
        return config if isinstance(config, dict) else {}

    def forget(self) -> None:
        """POST /reset_prefix_cache until it says that L0 is empty. Development mode only."""
        deadline = time.monotonic() + FORGET_DEADLINE_S
        while not self.http.json("POST", "/reset_prefix_cache").get("success"):
            if time.monotonic() > deadline:
                raise EngineLost(
                    f"POST {self.url}/reset_prefix_cache",
                    seen=f"after {FORGET_DEADLINE_S:g} s blocks are still in use",
                    do="Let no other request run on this engine; it is the warmer, outside the fleet's Service.",
                )
            time.sleep(FORGET_AGAIN_S)

    def healthy(self) -> bool:
        """Whether /health answers."""
        try:
            self.http.call("GET", "/health")
        except (EngineRefused, EngineUnavailable):
            return False
        return True

    def prompt_tokens(self) -> dict[str, int]:
        """Prompt tokens since start by where they came from: computed, local_hit, external."""
        samples = read_metrics(self.http.call("GET", "/metrics").text)
        name = "vllm:prompt_tokens_by_source_total"
        sources = {"computed": "local_compute", "local_hit": "local_cache_hit", "external": "external_kv_transfer"}
        return {key: total(samples, name, source=source) for key, source in sources.items()}

    def _chat(self, messages: Messages, options: RenderOptions) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "messages": list(messages), "add_generation_prompt": True}
        if options.tools:
            body["tools"] = list(options.tools)
        if options.chat_template_kwargs:
            body["chat_template_kwargs"] = dict(options.chat_template_kwargs)
        return body

    def _completion(self, ids: TokenIds, max_tokens: int, salt: str | None, adapter: str | None) -> dict[str, Any]:
        body = {"model": adapter or self.model, "prompt": ids.tolist(), "max_tokens": max_tokens, "temperature": 0}
        return body | {"cache_salt": salt} if salt else body


def _ids(values: list[int]) -> TokenIds:
    return np.array(values, np.uint32)


def _cached(usage: Mapping[str, Any]) -> int:
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def _get(config: Mapping[str, Any], section: str, name: str, strip: str = "") -> Any:
    value = (config.get(section) or {}).get(name)
    return value.removeprefix(strip) if strip and isinstance(value, str) else value


@dataclass(frozen=True, slots=True)
class NoEngine:
    """Stands where no engine runs: what is cached needs none, anything else is an error that says so."""

    fleet: str

    def _refuse(self, doing: str) -> EngineUnavailable:
        return EngineUnavailable(
            f"{doing} for fleet {self.fleet!r}", seen="no engine of this fleet runs", do="Start one: warmfront up."
        )

    def render(self, messages: Messages, options: RenderOptions) -> TokenIds:
        raise self._refuse("rendering a changed template")

    def render_for_chat(self, messages: Messages, options: RenderOptions) -> TokenIds | None:
        raise self._refuse("rendering a changed template")

    def tokenize(self, text: str, *, special_tokens: bool = False) -> TokenIds:
        raise self._refuse("tokenizing")

    def prefill(self, ids: TokenIds, salt: str | None, adapter: str | None = None) -> Usage:
        raise self._refuse("prefilling")

    def identity(self) -> EngineIdentity:
        raise self._refuse("asking what runs")
