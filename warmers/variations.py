"""Where renderings of one template differ, for people to read."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from warmers.templates import Messages

MAX_SHOWN = 80
"""Characters of a varying line that are kept for people to read."""


@dataclass(frozen=True, slots=True)
class Variation:
    """A place where renderings differ: it ends the prefix, or stands behind its end."""

    where: str
    """`message 1 (system), line 3`, `tools`, or `the chat template`."""
    values: tuple[str, ...]
    """The line as two of the renderings have it."""
    lost_chars: int
    """Unchanging text that stands behind it: shared by all requests, and never reused."""

    def __str__(self) -> str:
        values = " | ".join(repr(value) for value in self.values)
        return f"{self.where}: {values}; {self.lost_chars:,} characters behind it are never shared"


def varying_lines(renderings: Sequence[Messages]) -> tuple[Variation, ...]:
    """Every line that differs between renderings, in order; of a message whose line count differs, its first."""
    found: list[Variation] = []
    constant = 0
    for index in reversed(range(min(len(messages) for messages in renderings))):
        versions = [messages[index] for messages in renderings]
        texts = [str(message.get("content") or "") for message in versions]
        where = f"message {index + 1} ({versions[0].get('role', '?')})"
        for number, row in reversed(list(enumerate(_aligned(texts), 1))):
            if len(set(row)) == 1:
                constant += len(row[0]) + 1
                continue
            found.insert(0, Variation(f"{where}, line {number}", shown(row), constant))
    return tuple(found)


def _aligned(texts: Sequence[str]) -> list[tuple[str, ...]]:
    """Lines side by side; where counts differ, equal ends stay aligned and what is between them is one row."""
    split = [text.split("\n") for text in texts]
    shortest = min(map(len, split))
    if max(map(len, split)) == shortest:
        return list(zip(*split, strict=True))
    head = next((i for i in range(shortest) if len({lines[i] for lines in split}) > 1), shortest)
    tail = next((i for i in range(shortest - head) if len({lines[-1 - i] for lines in split}) > 1), shortest - head)
    middle = tuple("\n".join(lines[head : len(lines) - tail]) for lines in split)
    heads = zip(*(lines[:head] for lines in split), strict=True)
    tails = zip(*(lines[len(lines) - tail :] for lines in split), strict=True)
    return [*heads, middle, *tails]


def first_difference(one: str, two: str) -> tuple[int, tuple[str, str]]:
    """Number of the first line that differs, from 1 on, and that line in both."""
    rows = zip_longest(one.split("\n"), two.split("\n"), fillvalue="")
    number, row = next((n, row) for n, row in enumerate(rows, 1) if row[0] != row[1])
    first, second = shown(row)
    return number, (first, second)


def shown(row: Sequence[str]) -> tuple[str, ...]:
    """Two differing values of a line, cut to a window around their first difference."""
    one, two = list(dict.fromkeys(row))[:2]
    at = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    start = max(0, at - MAX_SHOWN // 2)
    return tuple(("…" if start else "") + value[start : start + MAX_SHOWN] for value in (one, two))
