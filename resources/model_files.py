"""A model directory: what its config says of KV, and the digests that tell one revision from another."""

import json
import re
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from warmers.errors import ConfigError, TemplateError
from warmers.fleet import KVShape, Model
from warmers.prefixes import Messages, RenderOptions

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "special_tokens_map.json")
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
READS_CLOCK = re.compile(r"strftime_now|\bnow\s*\(|\butcnow\b|\btoday\s*\(")
CLOCKS = (datetime(2026, 1, 15, 9, 7, 31), datetime(2031, 12, 28, 22, 48, 59))
"""Two times that differ in every field."""


def read_model(directory: Path, served_name: str, served_directory: Path) -> Model:
    """Read a Hugging Face model directory.

    The path that replicas serve it under, and so every KV key, carries the digest of the weights:
    `<served_directory>/<16 hex>`, a link that local replicas make.
    """
    config = _json(directory / "config.json")
    text = config.get("text_config", config)
    weights = sorted(directory.glob("*.safetensors"))
    if not weights:
        raise ConfigError(f"reading model {directory}", seen="no *.safetensors file", do="Convert the weights.")
    try:
        heads = text["num_attention_heads"]
        shape = KVShape(
            layers=text["num_hidden_layers"],
            kv_heads=text.get("num_key_value_heads") or heads,
            head_dim=text.get("head_dim") or text["hidden_size"] // heads,
        )
    except KeyError as missing:
        raise ConfigError(
            f"reading model {directory}", seen=f"config.json has no {missing}", do="Only decoder models are known."
        ) from None
    tokenizer = [directory / name for name in (*TOKENIZER_FILES, TOKENIZER_CONFIG)]
    digest = digest_files([directory / "config.json", *weights])
    return Model(
        served_name=served_name,
        path=str(served_directory / digest[:16]),
        weights_digest=digest,
        tokenizer_digest=digest_files(path for path in tokenizer if path.exists()),
        shape=shape,
        chat_template=read_chat_template(directory),
    )


def digest_files(paths: Iterable[Path]) -> str:
    """BLAKE3 over names and contents, 64 hex digits."""
    from blake3 import blake3

    whole = blake3()
    for path in paths:
        content = blake3(max_threads=blake3.AUTO).update_mmap(path).digest()
        whole.update(path.name.encode() + b"\0" + content)
    return whole.hexdigest()


def read_chat_template(directory: Path) -> str | None:
    """The chat template as transformers finds it: a file of its own, else a field of the tokenizer's config."""
    own = directory / CHAT_TEMPLATE
    if own.exists():
        return own.read_text()
    config = directory / TOKENIZER_CONFIG
    template = _json(config).get("chat_template") if config.exists() else None
    return template if isinstance(template, str) else None


def clock_texts(model: Model, messages: Messages, options: RenderOptions) -> tuple[str, str] | None:
    """One request rendered by the chat template at two clock times; None where the template reads no clock."""
    if model.chat_template is None or not READS_CLOCK.search(model.chat_template):
        return None
    first, second = (_render_chat(model.chat_template, messages, options, clock) for clock in CLOCKS)
    return None if first == second else (first, second)


def _render_chat(template: str, messages: Messages, options: RenderOptions, clock: datetime) -> str:
    from jinja2 import TemplateError as JinjaError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> str:
        raise JinjaError(message)

    # The environment that transformers gives chat templates.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, **k: json.dumps(value, ensure_ascii=False, **k)
    environment.globals |= {
        "strftime_now": clock.strftime,
        "now": lambda *_: clock,
        "raise_exception": refuse,
        "bos_token": "",
        "eos_token": "",
    }
    try:
        return environment.from_string(template).render(
            messages=messages,
            tools=options.tools,
            add_generation_prompt=True,
            **(options.chat_template_kwargs or {}),
        )
    except Exception as error:
        raise TemplateError(
            "rendering the model's chat template at two clock times",
            seen=f"{type(error).__name__}: {error}",
            do="It reads the clock and cannot be rendered here, so its shared start is unknown: take the clock out.",
        ) from error


def _json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"reading model {path.parent}", seen=f"no {path.name}", do="Name a model directory."
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"reading model {path.parent}", seen=f"{path.name}: {error}", do="Repair the file.") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"reading model {path.parent}", seen=f"{path.name} is no object", do="Repair the file.")
    return loaded
