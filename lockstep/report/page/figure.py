"""A PlotSpec: traces and axes for plotly as plain values, with the table of the same numbers beneath.

Colours are names, `c0` to `c7` and `ink`: page.js puts those of the reader's light or dark scheme there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from lockstep.report.page.markup import Html, fold_away

_NUM_COLORS = 8
_DASHES = ("solid", "dash", "dashdot")  # of the first series, and of those whose colours come again
_WIDE = 8  # times as many workers
_DECADES = 50.0  # from so many times on, a logarithmic axis names powers of ten alone
_MOST_TICKS, _EDGE = 6, 0.06
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
    return f"c{place % _NUM_COLORS}"


def series_dash(place: int) -> str:
    """How a series' line is drawn, so that those of one colour differ."""
    return _DASHES[place // _NUM_COLORS % len(_DASHES)]


def make_axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis with a title."""
    return {"title": {"text": title}, **more}


def counts_axis(title: str, counts: Sequence[float], is_log: bool) -> dict[str, Any]:
    """An axis of few numbers, as of workers, each of them named."""
    log = {"type": "log"} if is_log else {}
    return make_axis(title, tickmode="array", tickvals=[*counts], tickformat="~g", **log)


def value_axis(title: str, values: Iterable[float], far: float, ticks: str = ",~f") -> dict[str, Any]:
    """From 0 or, if the values above 0 lie so many times apart, logarithmic."""
    found = [value for value in values if value > 0]
    times = max(found) / min(found) if found else 1.0
    if times < far:
        return make_axis(title, rangemode="tozero")
    low, high = math.log10(min(found)), math.log10(max(found))
    tens = {"dtick": math.ceil((high - low) / _MOST_TICKS)} if times > _DECADES else {}
    edge = _EDGE * (high - low)
    log = {"type": "log", "tickformat": ticks, "range": [low - edge, high + edge]}
    return {"title": {"text": title, "standoff": 12}, **log, **tens}


def is_wide(counts: Sequence[int]) -> bool:
    """Whether numbers of workers, which rise, lie so far apart that a logarithmic axis is better."""
    return counts[-1] >= _WIDE * counts[0]


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
