"""One small picture: what warming saved. Drawn here, as SVG, so that nothing that plots has to be imported."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

ROWS = 12
"""The prefixes with the longest cold prefill; the rest are in the table."""
WIDTH, BAR_X, BAR_W, ROW_H, TOP = 760, 250, 330, 30, 48
COLD, WARM, INK, PAPER, GOOD, BAD = "#9aa5b1", "#e8710a", "#1f2933", "#ffffff", "#2e7d32", "#c62828"


def ttft_picture(prefixes: Sequence[Mapping[str, Any]]) -> str:
    """Markdown with a bar for the cold and the warm TTFT of each prefix of a proof document, and its hit share."""
    slowest = sorted(prefixes, key=lambda row: -row["ttft_cold_s"])[:ROWS]
    if not slowest:
        return "No prefix was proven."
    scale = BAR_W / max(row["ttft_cold_s"] or 1.0 for row in slowest)
    rows = "".join(_row(TOP + number * ROW_H, row, scale) for number, row in enumerate(slowest))
    height = TOP + len(slowest) * ROW_H + 8
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" rx="6" fill="{PAPER}"/>{_legend()}{rows}</svg>'
    )
    return f"![TTFT cold and warm, by prefix](data:image/svg+xml;base64,{b64encode(svg.encode()).decode()})"


def _legend() -> str:
    swatches = (_bar(BAR_X, 16, 10, COLD), _bar(BAR_X + 110, 16, 10, WARM))
    texts = (
        _text(12, 26, "time to first token", weight="bold"),
        _text(BAR_X + 16, 26, "cold"),
        _text(BAR_X + 126, 26, "from L2"),
        _text(WIDTH - 12, 26, "hit share", anchor="end", weight="bold"),
    )
    return "".join((*swatches, *texts))


def _row(y: int, row: Mapping[str, Any], scale: float) -> str:
    cold, warm = row["ttft_cold_s"], row["ttft_warm_s"]
    share = row["hit_tokens"] / row["expected_tokens"] if row["expected_tokens"] else 0.0
    label = row["label"] if len(row["label"]) <= 34 else row["label"][:33] + "…"
    mark, fill = ("✓", GOOD) if row["verdict"] == "proven" else ("✗", BAD)
    return "".join(
        (
            _text(12, y + 16, label),
            _bar(BAR_X, y + 3, cold * scale, COLD),
            _bar(BAR_X, y + 13, max(2.0, warm * scale), WARM),
            _text(BAR_X + BAR_W + 10, y + 16, f"{_time(cold)} → {_time(warm)}"),
            _text(WIDTH - 12, y + 16, f"{mark} {share:.0%}", anchor="end", fill=fill),
        )
    )


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def _bar(x: float, y: float, width: float, fill: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width:.1f}" height="9" rx="2" fill="{fill}"/>'


def _text(x: int, y: int, text: str, *, anchor: str = "start", weight: str = "normal", fill: str = INK) -> str:
    style = f'text-anchor="{anchor}" font-weight="{weight}" fill="{fill}"'
    return f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>'
