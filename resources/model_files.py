"""A model directory: what its config says of KV, and the digests that tell one revision from another."""

import json
import re
from collections.abc import Iterable
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resources.placeholders import CLOCKS
from warmers.errors import ConfigError, TemplateError
from warmers.fleet import KVShape, Model
from warmers.templates import Messages, RenderOptions

if TYPE_CHECKING:
    from jinja2 import Template as Text

CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")
CHAT_TEMPLATE = "chat_template.jinja"
READS_CLOCK = re.compile(r"strftime_now|\bnow\s*\(|\butcnow\b|\btoday\s*\(")


def read_model(directory: Path, served_name: str, served_directory: Path) -> Model:
    """Read a Hugging Face model directory.

    The path that replicas serve it under, and so every KV key, carries the digest of the weights:
    `<served_directory>/<16 hex>`, a link that local replicas make.
    """
    weights = sorted(directory.glob("*.safetensors"))
    if not weights:
        raise ConfigError(f"reading model {directory}", seen="no *.safetensors file", do="Convert the weights.")
    digest = digest_files([directory / CONFIG, *weights])
    return describe(directory, served_name, str(served_directory / digest[:16]), digest)


def describe(directory: Path, served_name: str, path: str, weights_digest: str, stage_uri: str = "") -> Model:
    """A model by its files, the weights apart. `path` is the string in KV keys."""
    config = _json(directory / CONFIG)
    text = config.get("text_config", config)
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
    # Everything that is neither weights nor their config may shape token ids: tokenizer, added tokens, templates.
    others = (path for path in sorted(directory.iterdir()) if path.is_file() and not path.name.endswith(WEIGHTS))
    tokenizer = [path for path in others if path.name != CONFIG and path.stat().st_size]
    return Model(
        served_name=served_name,
        path=path,
        weights_digest=weights_digest,
        tokenizer_digest=digest_files(tokenizer),
        shape=shape,
        chat_template=read_chat_template(directory),
        special_tokens=read_special_tokens(directory),
        stage_uri=stage_uri,
    )


def digest_files(paths: Iterable[Path]) -> str:
    """BLAKE3 over names and contents, 64 hex digits."""
    from blake3 import blake3

    whole = blake3()
    for path in paths:
        stat = path.stat()
        whole.update(path.name.encode() + b"\0" + _digest_file(path, stat.st_size, stat.st_mtime_ns, stat.st_ino))
    return whole.hexdigest()


@lru_cache(maxsize=1024)
def _digest_file(path: Path, size: int, mtime_ns: int, inode: int) -> bytes:
    """Read once a process, as long as the file stays as it is."""
    from blake3 import blake3

    return blake3(max_threads=blake3.AUTO).update_mmap(path).digest() if size else b""


def read_chat_template(directory: Path) -> str | None:
    """The chat template as transformers finds it: a file of its own, else a field of the tokenizer's config."""
    own = directory / CHAT_TEMPLATE
    if own.exists():
        return own.read_text()
    config = directory / TOKENIZER_CONFIG
    template = _json(config).get("chat_template") if config.exists() else None
    if isinstance(template, list):  # several by name; which of them serves a request is the engine's to choose
        named = {str(entry.get("name")): str(entry.get("template")) for entry in template}
        if any(READS_CLOCK.search(text) for text in named.values()):
            raise ConfigError(
                f"reading model {directory}",
                seen=f"one of its chat templates ({', '.join(named)}) reads the clock",
                do="Put the one that is served into chat_template.jinja, so that its shared start can be found.",
            )
        return named.get("default")
    return template if isinstance(template, str) else None


def read_special_tokens(directory: Path) -> dict[str, str]:
    """Special tokens by name, as chat templates use them."""
    config = directory / TOKENIZER_CONFIG
    raw = _json(config) if config.exists() else {}
    found = {name: raw.get(name) for name in SPECIAL_TOKENS}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()}
    return {name: value for name, value in texts.items() if isinstance(value, str)}


def reads_clock(model: Model) -> bool:
    """Whether the chat template has the time in it."""
    return model.chat_template is not None and READS_CLOCK.search(model.chat_template) is not None


def clock_texts(model: Model, messages: Messages, options: RenderOptions) -> tuple[str, str] | None:
    """One request rendered by the chat template at two clock times; None where the template reads no clock."""
    if not reads_clock(model):
        return None
    first, second = (render_chat(model, messages, options, clock) for clock in CLOCKS)
    return None if first == second else (first, second)


def render_chat(model: Model, messages: Messages, options: RenderOptions, clock: datetime) -> str:
    """A chat request as text, by the model's chat template at a clock time of ours. Raises TemplateError."""
    try:
        return _chat_template(model.chat_template or "").render(
            {
                **model.special_tokens,
                "strftime_now": clock.strftime,
                "now": lambda *_: clock,
                "messages": messages,
                "tools": options.tools,
                "add_generation_prompt": True,
                **(options.chat_template_kwargs or {}),
            }
        )
    except Exception as error:
        raise TemplateError(
            "rendering the model's chat template at two clock times",
            seen=f"{type(error).__name__}: {error}",
            do="It reads the clock and cannot be rendered here, so its shared start is unknown: take the clock out.",
        ) from error


@lru_cache(maxsize=8)
def _chat_template(source: str) -> "Text":
    """Compiled in an environment like that which transformers gives chat templates."""
    from jinja2 import TemplateError as JinjaError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> str:
        raise JinjaError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, **k: json.dumps(value, ensure_ascii=False, **k)
    environment.globals["raise_exception"] = refuse
    return environment.from_string(source)


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
