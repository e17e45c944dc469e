"""Draws how long each contestant trained: a bar each, on a logarithmic axis."""

from __future__ import annotations

from collections.abc import Mapping
from math import floor, log10
from pathlib import Path

_COLORS = {"Lockstep": "#ee6677"}


def draw_baselines(path: Path, seconds: Mapping[str, float]) -> None:
    """`seconds` of training by contestant."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.36 * len(seconds)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    colors = [_COLORS.get(name.split(",")[0], "#4477aa") for name in seconds]
    axes.barh(list(seconds), list(seconds.values()), 0.7, color=colors)
    for row, value in enumerate(seconds.values()):
        axes.annotate(
            f"{value:,.3g} s", (value, row), (3, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.set_xscale("log")
    axes.set_xlim(10 ** floor(log10(min(seconds.values()) / 2)), 2 * max(seconds.values()))
    axes.invert_yaxis()
    axes.set_xlabel("seconds of training")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
