"""Draws how the time for an image falls with more threads or workers, beside the ideal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

_COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44")


def draw_threads(
    path: Path, what: str, curves: Mapping[str, Sequence[tuple[int, float]]], words: Sequence[str]
) -> None:
    """Both axes logarithmic; `what` is counted, `curves` has (count, ms for an image), `words` go below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

    figure = Figure(figsize=(9, 6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for place, (kind, points) in enumerate(curves.items()):
        color, counts = _COLORS[place % len(_COLORS)], [count for count, _ in points]
        axes.plot(counts, [ms for _, ms in points], color=color, marker="o", markersize=4, label=kind)
        first, ms = points[0]
        ideal = [ms * first / count for count in counts]
        axes.plot(counts, ideal, color=color, linestyle="--", linewidth=1, alpha=0.6)
    axes.plot(
        [], [], color="#555555", linestyle="--", linewidth=1, label="ideal: twice as many, half the time"
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    places = sorted({count for points in curves.values() for count, _ in points})
    axes.xaxis.set_major_locator(FixedLocator(places))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([f"{place:,}" for place in places], rotation=45 if len(places) > 8 else 0)
    axes.yaxis.set_major_formatter("{x:g}")
    if _spread(curves) > 30:
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel(what)
    axes.set_ylabel("milliseconds for an image in training")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.supxlabel("\n".join(words), x=0.02, ha="left", fontsize=7)
    figure.savefig(path)


def _spread(curves: Mapping[str, Sequence[tuple[int, float]]]) -> float:
    times = [ms for points in curves.values() for _, ms in points]
    return max(times) / min(times)
