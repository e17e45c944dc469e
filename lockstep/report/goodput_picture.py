"""Draws goodput by the interval between checkpoints: recovery beside restarts, for some rates of failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_COLORS = ("#4477aa", "#cc6677", "#228833", "#aa3377", "#ccbb44", "#66ccee")


@dataclass(frozen=True)
class GoodputCurve:
    """One rate of failure; the points of both ways are shares of a run's time."""

    name: str
    intervals_s: Sequence[float]
    restart: Sequence[float]
    recovery: Sequence[float]
    young_s: float


def draw_goodput(path: Path, title: str, curves: Sequence[GoodputCurve]) -> None:
    """A full line for recovery, a dashed one for restarts, a mark where Young and Daly put checkpoints."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator

    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, curve in enumerate(curves):
        color = _COLORS[number % len(_COLORS)]
        minutes = [seconds / 60 for seconds in curve.intervals_s]
        width = 1.5 * (len(curves) - number)  # lines of recovery often lie on each other
        axes.plot(minutes, [100 * part for part in curve.recovery], color=color, linewidth=width)
        axes.plot(minutes, [100 * part for part in curve.restart], color=color, marker=".", linestyle="--")
        axes.plot([], [], color=color, linewidth=3, label=curve.name)
        if minutes[0] <= curve.young_s / 60 <= minutes[-1]:
            axes.axvline(curve.young_s / 60, color=color, linestyle=":", linewidth=1)
    axes.plot([], [], color="#555555", label="recovery: the step is redone")
    axes.plot([], [], color="#555555", linestyle="--", label="restart from the last checkpoint")
    axes.plot([], [], color="#555555", linestyle=":", linewidth=1, label="Young and Daly, for restarts")
    axes.set_xscale("log")
    places = sorted({seconds / 60 for curve in curves for seconds in curve.intervals_s})
    axes.xaxis.set_major_locator(FixedLocator(places))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([f"{place:.3g}" for place in places])
    axes.set_xlabel("minutes of training between checkpoints")
    axes.set_ylabel("goodput, % of the run's time")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.suptitle(title, x=0.02, ha="left", fontsize=10)
    figure.savefig(path)
