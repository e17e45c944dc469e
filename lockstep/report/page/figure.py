"""A PlotSpec: traces and axes for plotly as plain values, with the table of the same numbers beneath.

Colours are names, `c0` to `c7` and `ink`: page.js puts those of the reader's light or dark scheme there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

from lockstep.report.page.markup import Html, fold_away

NUM_COLORS = 8
_OURS = {"hovertemplate"}  # written by us; holds HTML of plotly's and no text of a file
_ROW_PX, _AROUND_PX = 26, 110


@dataclass(frozen=True)
class PlotSpec:
    """What one plot shows; `says` is for those who cannot see it."""

    title: str
    says: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    height: int = 340

    def __post_init__(self) -> None:
        assert self.traces and all(len(trace["x"]) for trace in self.traces), f"{self.title}: empty plot"


class Figures:
    """All figures of a page, in their order."""

    def __init__(self) -> None:
        self.drawn: list[PlotSpec] = []

    def place(self, figure: PlotSpec, *tables: Html) -> Html:
        """The figure's place on the page, with its table, unless a table follows that is always open."""
        folded = fold_away("The numbers", *tables).text if tables else ""
        number = len(self.drawn)
        self.drawn.append(figure)
        return Html(
            f"<figure><figcaption>{escape(figure.title)}</figcaption>"
            f'<div class="plot" id="plot{number}" role="img" aria-label="{escape(figure.says, quote=True)}" '
            f'style="height:{figure.height}px"></div>{folded}</figure>'
        )

    def as_json(self) -> str:
        """What page.js draws, safe inside a script element."""
        rows = [{"data": figure.traces, "layout": figure.layout} for figure in self.drawn]
        text = json.dumps(_plain(rows), separators=(",", ":"), allow_nan=False)
        return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def series_color(place: int) -> str:
    """The name of a series' colour."""
    return f"c{place % NUM_COLORS}"


def make_axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis with a title."""
    return {"title": {"text": title}, **more}


def list_axis(names: list[str]) -> dict[str, Any]:
    """An axis that lists names from top to bottom; page.js shortens them where there is little room."""
    return {
        "tickmode": "array",
        "tickvals": list(range(len(names))),
        "ticktext": names,
        "range": [len(names) - 0.4, -0.6],
        "fixedrange": True,
    }


def list_height(count: int) -> int:
    """The height of a figure with so many rows."""
    return _AROUND_PX + _ROW_PX * max(count, 2)


def _plain(value: Any) -> Any:
    """Values that JSON has; texts without meaning as HTML, which plotly would show as such."""
    if isinstance(value, str):
        return escape(value, quote=False)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: item if key in _OURS else _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
