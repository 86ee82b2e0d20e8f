"""The first place where a request is other than a template's requests: a tool, a line of a message, or a token."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os.path import commonprefix

from warmers.keys import TokenIds
from warmers.prefixes import Prefix
from warmers.templates import Messages, RenderOptions, Template
from warmers.variations import shown

MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
DATE = re.compile(rf"\b(?:{MONTHS})\b|\b20\d\d\b|\b\d{{1,2}}[-/.:]\d{{1,2}}\b")


@dataclass(frozen=True, slots=True)
class Captured:
    """A request as a client sent it."""

    model: str
    messages: Messages | None
    """Of a chat request."""
    options: RenderOptions
    salt: str
    ids: TokenIds | None
    """Its prompt's token ids, by the engine or from the request itself; None where no engine could be asked."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where the request is not what was warmed."""

    where: str
    """`message 1 (system), line 3`, `tool 2`, or `token 301`."""
    warmed: str
    request: str
    do: str


def first_divergence(
    request: Captured, prefix: Prefix, template: Template | None, token: int | None
) -> Divergence | None:
    """The first difference that people can read; by its token alone where texts are equal."""
    if template is not None and request.messages is not None:
        for found in (
            _other_tools(request, template),
            _other_message(request, template),
            _other_kwargs(request, template),
        ):
            if found is not None:
                return found
    if token is None:
        return None
    ours, theirs = (_near(ids, token) for ids in (prefix.ids, request.ids))
    if template is None:
        return Divergence(f"token {token}", ours, theirs, f"Template {prefix.label!r} cannot be read now: repair it.")
    do = "The texts are the template's, the token ids are not what was warmed: template, tokenizer or chat template "
    do += "changed since, or a clock moved on. Run warmfront warm."
    if request.messages is None:
        do = "Send the prompt as the engine renders the template, or send its messages as a chat request."
    return Divergence(f"token {token}", ours, theirs, do)


def _near(ids: TokenIds | None, token: int) -> str:
    return " ".join(map(str, [] if ids is None else ids[token : token + 8].tolist())) or "(its end)"


def _other_tools(request: Captured, template: Template) -> Divergence | None:
    warmed, sent = ([_tool_text(tool) for tool in o.tools or ()] for o in (template.options, request.options))
    if warmed == sent:
        return None
    names = [[_tool_name(tool) for tool in o.tools or ()] for o in (template.options, request.options)]
    at = next((i for i, (a, b) in enumerate(zip(warmed, sent, strict=False)) if a != b), min(len(warmed), len(sent)))
    first, second = (tools[at] if at < len(tools) else "(no such tool)" for tools in (warmed, sent))
    where = f"tool {at + 1}"
    if sorted(warmed) == sorted(sent):
        return Divergence(where, names[0][at], names[1][at], "Same tools, other order: send them in the template's.")
    if at < min(map(len, names)) and names[0][at] == names[1][at]:
        one, two = shown([first, second])
        return Divergence(
            f"{where} ({names[0][at]})", one, two, "The tool's JSON differs: send it as the template has it."
        )
    ours, theirs = (n[at] if at < len(n) else "(no tool)" for n in names)
    return Divergence(
        where, ours, theirs, "Other tools than the template's: send those, or warm a template with these."
    )


def _tool_text(tool: Mapping[str, object]) -> str:
    """Its JSON as it matters: vLLM orders the fields around `parameters` itself, and fills in type and nulls."""
    function = tool.get("function")
    inner = _in_order(function) if isinstance(function, Mapping) else function
    return json.dumps(_in_order({"type": "function", **tool, "function": inner}), ensure_ascii=False)


def _in_order(fields: Mapping[str, object]) -> dict[str, object]:
    return {name: fields[name] for name in sorted(fields) if fields[name] is not None}


def _tool_name(tool: Mapping[str, object]) -> str:
    function = tool.get("function")
    named = function if isinstance(function, Mapping) else tool
    return str(named.get("name", "?"))


def _other_message(request: Captured, template: Template) -> Divergence | None:
    sent = list(request.messages or ())
    for number, (role, text, whole) in enumerate(_fixed_texts(template)):
        where = f"message {number + 1} ({role})"
        if number >= len(sent):
            return Divergence(where, shown([text, ""])[0], "(no such message)", "Send the template's messages.")
        theirs = _text(sent[number])
        if sent[number].get("role") != role:
            return Divergence(where, role, str(sent[number].get("role")), "Send the template's roles.")
        if theirs == text or (not whole and theirs.startswith(text)):
            continue
        return _other_line(where, text, theirs)
    return None


def _other_line(where: str, text: str, theirs: str) -> Divergence:
    at = len(common_text([text, theirs]))
    line, start = text.count("\n", 0, at) + 1, text.rfind("\n", 0, at) + 1
    ours, sent = (value[start:].partition("\n")[0] for value in (text, theirs))
    if ours == sent:  # one of the two ends here
        ours, sent = text[start:], theirs[start:]
    do = "Send the template's text, or change the template and warm it."
    if DATE.search(sent):
        do = "It looks like a date: move it behind the shared text, or have the template "
        do += 'read the clock, {{ strftime_now("…") }}.'
    first, second = shown([ours, sent])
    return Divergence(f"{where}, line {line}", first, second, do)


def _other_kwargs(request: Captured, template: Template) -> Divergence | None:
    ours, theirs = (dict(o.chat_template_kwargs or {}) for o in (template.options, request.options))
    if ours == theirs:
        return None
    return Divergence("chat_template_kwargs", json.dumps(ours), json.dumps(theirs), "Send the template's.")


def likeness(request: Captured, template: Template) -> tuple[float, float]:
    """Shares of the template's fixed text that the request has too: as its start, and line by line."""
    fixed = _fixed_texts(template)
    sent = [_text(message) for message in request.messages or ()]
    whole = sum(len(text) for _, text, _ in fixed)
    if not whole:
        return 0.0, 0.0
    start = 0
    for (_, text, _), theirs in zip(fixed, sent, strict=False):
        start += len(common_text([text, theirs]))
        if not theirs.startswith(text):
            break
    lines = {line for theirs in sent for line in theirs.split("\n")}
    same = sum(len(line) + 1 for _, text, _ in fixed for line in text.split("\n") if line in lines)
    return start / whole, min(1.0, same / whole)


def _text(message: Mapping[str, object]) -> str:
    return str(message.get("content") or "")


def _fixed_texts(template: Template) -> list[tuple[str, str, bool]]:
    """(role, text, whole) of each message up to the first place that varies: what every request starts with."""
    renderings = list(template.renderings)
    found = []
    for versions in zip(*renderings, strict=False):
        text = common_text([_text(message) for message in versions])
        whole = all(_text(message) == text for message in versions)
        found.append((str(versions[0].get("role", "?")), text, whole))
        if not whole:
            break
    return found


def common_text(texts: Iterable[str]) -> str:
    """What all texts start with."""
    return commonprefix(list(texts))  # noqa: RUF071 - characters are what is meant
