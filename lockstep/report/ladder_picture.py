"""Draws how fast every rung of a ladder is, by size: a group of bars for each rung."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

_COLORS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377")


def draw_ladder(
    path: Path,
    sizes: Sequence[str],
    rates: Mapping[str, Mapping[str, float]],
    libraries: Collection[str] = (),
) -> None:
    """`rates` has GFLOP/s of each rung by size; what was left out is not there. A line ends each library."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    figure = Figure(figsize=(9, 1.9 + (0.16 + 0.12 * len(sizes)) * len(rates)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    height = 0.84 / len(sizes)
    for place, size in enumerate(sizes):
        found = [(row, rate[size]) for row, rate in enumerate(rates.values()) if size in rate]
        rows, values = [row + (place + 0.5) * height - 0.42 for row, _ in found], [rate for _, rate in found]
        axes.barh(rows, values, 0.9 * height, color=_COLORS[place % len(_COLORS)], label=size)
        for row, value in zip(rows, values, strict=True):
            axes.annotate(
                f"{value:,.0f}" if value >= 100 else f"{value:.3g}",
                (value, row),
                (3, 0),
                textcoords="offset points",
                va="center",
                fontsize=6,
            )
    for row, name in enumerate(rates):
        if name in libraries:
            axes.axhline(row + 0.5, color="#999999", linewidth=0.6)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.12, y=0.01)
    axes.set_yticks(range(len(rates)), list(rates))
    axes.invert_yaxis()
    axes.set_xlabel("GFLOP/s")
    axes.set_title("Products of matrices, rung by rung", fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    beside = max(1, min(6, 100 // (6 + max(map(len, sizes)))))  # so many letters are as wide as the picture
    figure.legend(loc="outside lower center", ncols=beside, frameon=False, fontsize=8)
    figure.savefig(path)
