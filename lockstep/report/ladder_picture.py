"""Draws how fast every rung of a ladder is, by size: a group of bars for each rung."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

_COLORS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377")


def draw_ladder(path: Path, sizes: Sequence[str], rates: Mapping[str, Sequence[float]]) -> None:
    """`rates` has GFLOP/s of each rung at each of the sizes, or at the first of them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.6 + 0.42 * len(rates)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    height = 0.8 / len(sizes)
    for place, size in enumerate(sizes):
        found = [(row, rate[place]) for row, rate in enumerate(rates.values()) if place < len(rate)]
        rows, values = [row + (place + 0.5) * height - 0.4 for row, _ in found], [rate for _, rate in found]
        axes.barh(rows, values, 0.9 * height, color=_COLORS[place % len(_COLORS)], label=size)
        for row, value in zip(rows, values, strict=True):
            axes.annotate(
                f"{value:,.3g}", (value, row), (3, 0), textcoords="offset points", va="center", fontsize=7
            )
    axes.set_xscale("log")
    axes.margins(x=0.12)
    axes.set_yticks(range(len(rates)), list(rates))
    axes.invert_yaxis()
    axes.set_xlabel("GFLOP/s")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    figure.savefig(path)
