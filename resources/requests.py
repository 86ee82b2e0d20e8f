"""Captured requests: the JSON body of a chat or completion request, as a client sent it."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from warmers.divergence import Captured
from warmers.errors import RequestError
from warmers.prefixes import Engine
from warmers.salts import check_salt
from warmers.templates import RenderOptions

TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**32)]


class _Message(BaseModel):
    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[dict[str, Any]] | None = None

    def sent(self) -> dict[str, Any]:
        """As it came."""
        return self.model_dump(exclude_unset=True)

    def plain(self) -> dict[str, Any]:
        """Content parts as one text, as chat templates of text models see them."""
        parts = self.content if isinstance(self.content, list) else None
        text = self.content if parts is None else "\n".join(str(part.get("text", "")) for part in parts)
        return self.sent() | {"content": text or ""}


class Request(BaseModel):
    """The fields of a request that decide what it hits; all others are left alone."""

    model_config = ConfigDict(extra="ignore")
    model: str = ""
    messages: list[_Message] | None = None
    prompt: str | list[TokenId] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: Annotated[str, AfterValidator(check_salt)] | None = None

    @model_validator(mode="after")
    def _has_a_prompt(self) -> "Request":
        if not (self.messages or self.prompt):
            raise ValueError("it has neither messages nor a prompt")
        return self

    def captured(self, engine: Engine | None) -> Captured:
        """With token ids where the request has them, or an engine can render it. Raises EngineRefused."""
        messages = None if self.messages is None else [message.plain() for message in self.messages]
        options = RenderOptions(self.tools, self.chat_template_kwargs)
        ids = np.array(self.prompt, np.uint32) if isinstance(self.prompt, list) else None
        if engine is not None and self.messages is not None:
            ids = engine.render([message.sent() for message in self.messages], options)
        elif engine is not None and isinstance(self.prompt, str):
            ids = engine.tokenize(self.prompt, special_tokens=True)
        return Captured(self.model, messages, options, self.cache_salt or "", ids)


def read_request(file: str) -> Request:
    """Read a file; - for standard input. Raises RequestError naming file and field."""
    try:
        raw = json.loads(sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8"))
        return Request.model_validate(raw)
    except ValidationError as error:
        fields = ((".".join(map(str, e["loc"])), e["msg"].removeprefix("Value error, ")) for e in error.errors())
        seen = "; ".join(f"{field}: {message}" if field else message for field, message in fields)
    except (OSError, ValueError) as error:
        seen = str(error)
    do = "Give the JSON body of a request to /v1/chat/completions or /v1/completions."
    raise RequestError(f"reading the request in {file}", seen=seen, do=do)
