"""Draws what a sweep found: accuracy by what was swept, and by step and time of all its runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from lockstep.report.swept_values import draw_values

_COLORS = (
    "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377",
    "#222255", "#ee8833", "#885522", "#00aa99", "#ff99cc", "#777777",
)  # fmt: skip
_OTHERS, _REST = "#cccccc", "others"
_WIDE = 130  # characters of a line of the legend
_LOG_FROM = 4  # times as many steps or as long
_LEAST = 3  # of a unit, the longest run's time
_UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


@dataclass(frozen=True)
class SweptCurve:
    """A combination: its values of the keys, and of each seed the step, seconds and percent by epoch."""

    label: str
    values: tuple[Any, ...]
    runs: tuple[tuple[tuple[int, float, float], ...], ...]
    color: str = _OTHERS

    @property
    def ends(self) -> list[float]:
        """The accuracy of each seed at the end."""
        return [run[-1][2] for run in self.runs]


def draw_sweep(path: Path, title: str, keys: Sequence[str], what: str, curves: Sequence[SweptCurve]) -> None:
    """`curves` are sorted, the best first; `what` says which images the accuracy is of."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    coloured = zip(curves, chain(_COLORS, repeat(_OTHERS)), strict=False)
    curves = [replace(each, color=color) for each, color in coloured]
    figure = Figure(figsize=(11, 8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplot_mosaic([["values", "values"], ["step", "time"]])
    is_named = draw_values(panels["values"], keys, curves)
    panels["values"].set_title(f"{title}: accuracy on {what} images", fontsize=11)
    _draw_curves(panels["step"], panels["time"], curves)
    for axes in panels.values():
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    if not is_named:
        _name(figure, panels["step"], [each.label for each in curves[: len(_COLORS)]])
    figure.savefig(path)


def _name(figure: Any, axes: Any, labels: Sequence[str]) -> None:
    """A legend below all panels, the best first, for which the figure grows."""
    known = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    names = [name for name in (*labels, _REST) if name in known]
    columns = max(min(4, _WIDE // (max(map(len, names)) + 8)), 1)
    figure.set_figheight(figure.get_figheight() + 0.22 * -(-len(names) // columns))
    handles = [known[name] for name in names]
    figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)


def _draw_curves(by_step: Any, by_time: Any, curves: Sequence[SweptCurve]) -> None:
    ends = [run[-1] for each in curves for run in each.runs]
    longest = max(seconds for _, seconds, _ in ends)
    unit_s, unit = next((size, name) for size, name in _UNITS if longest >= _LEAST * size or size == 1)
    for place in reversed(range(len(curves))):  # the best on top
        _draw_runs(by_step, by_time, curves[place], place, unit_s)
    _finish(by_step, "step", [step for step, _, _ in ends])
    _finish(by_time, f"{unit} of training steps", [seconds for _, seconds, _ in ends])


def _draw_runs(by_step: Any, by_time: Any, curve: SweptCurve, place: int, unit_s: float) -> None:
    """A line for each seed, all of one colour."""
    known = place < len(_COLORS)
    text = curve.label if known else _REST
    for number, run in enumerate(curve.runs):
        steps, seconds, percents = zip(*run, strict=True)
        label = text if not number and text not in by_step.get_legend_handles_labels()[1] else None
        style = {"color": curve.color, "marker": "o", "markersize": 3, "linewidth": 1.2 if known else 0.8}
        by_step.plot(steps, percents, label=label, **style)
        by_time.plot([each / unit_s for each in seconds], percents, **style)


def _finish(axes: Any, text: str, ends: Sequence[float]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    if max(ends) >= _LOG_FROM * min(ends):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter("{x:g}")
    else:
        axes.set_xlim(left=0)
    axes.set_xlabel(text)
    axes.set_ylabel("accuracy, %")
