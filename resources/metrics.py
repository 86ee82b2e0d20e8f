"""Prometheus' text format, as far as counters go."""

import re

SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Samples = list[tuple[str, dict[str, str], float]]


def read_metrics(text: str) -> Samples:
    """Every sample of a /metrics page: name, labels, value."""
    matches = (SAMPLE.match(line) for line in text.splitlines())
    return [(m["name"], dict(LABEL.findall(m["labels"] or "")), float(m["value"])) for m in matches if m]


def total(samples: Samples, name: str, **labels: str) -> int:
    """The sum over all samples of a counter that carry these labels; 0 where there is none yet."""
    return int(sum(v for n, have, v in samples if n == name and labels.items() <= have.items()))
