"""Draws accuracy by the values that were swept: lines for one or two keys, points or bars for more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any, Protocol

_LINES = [(style, marker) for style, marker in zip(("-", "--", ":", "-.") * 2, "osD^vP*X", strict=True)]
_GREY = "#777777"
_ON_X = "batch"  # the key that goes on the axis, where it is one of two
_LEAST_GAP = 0.05  # between two values that both have a tick, as a share of the axis
_LONG = 90  # characters that fit below an axis
_MOST_BARS = 12
_LOG_FROM = 4  # times the smallest value


class Swept(Protocol):
    """A combination: its color in all panels, its values, and the accuracy of each seed."""

    @property
    def label(self) -> str: ...
    @property
    def color(self) -> str: ...
    @property
    def values(self) -> tuple[Any, ...]: ...
    @property
    def ends(self) -> list[float]: ...


def draw_values(axes: Any, keys: Sequence[str], curves: Sequence[Swept]) -> bool:
    """What suits the number of keys and of their values; tells whether it names the combinations."""
    values = [_sorted({each.values[place] for each in curves}) for place in range(len(keys))]
    if len(keys) == 1:
        _draw_lines(axes, keys, curves, values, 0)
    elif len(keys) == 2:
        x = keys.index(_ON_X) if _ON_X in keys else int(_rank(values[1]) > _rank(values[0]))
        if len(values[1 - x]) <= len(_LINES):
            _draw_lines(axes, keys, curves, values, x)
        else:
            _draw_points(axes, keys, curves, values)
    else:
        _draw_bars(axes, curves)
        return True
    return False


def _rank(values: Sequence[Any]) -> tuple[bool, int]:
    """A key of numbers goes before others on the axis, then the one with more values."""
    return _is_number(values), len(values)


def _draw_lines(axes: Any, keys: Sequence[str], curves: Sequence[Swept], values: Any, x: int) -> None:
    """A line for each value of the other key, if there is one; bars for the spread over seeds."""
    other = 1 - x if len(keys) == 2 else None
    places = _scale(axes.xaxis, axes.set_xscale, values[x])
    for value, (style, marker) in zip([None] if other is None else values[other], _LINES, strict=False):
        line = [each for each in curves if other is None or each.values[other] == value]
        line.sort(key=lambda each: places[each.values[x]])
        means = [fmean(each.ends) for each in line]
        spread = [[m - min(e.ends) for m, e in zip(means, line, strict=True)],
                  [max(e.ends) - m for m, e in zip(means, line, strict=True)]]  # fmt: skip
        at = [places[each.values[x]] for each in line]
        label = None if other is None else f"{keys[other]} {_text(value)}"
        axes.errorbar(at, means, spread, color=_GREY, linestyle=style, linewidth=1.2, capsize=3)
        axes.scatter(at, means, c=[each.color for each in line], marker=marker, s=50, zorder=3)
        axes.plot([], [], color=_GREY, linestyle=style, marker=marker, label=label)
    axes.set_xlabel(keys[x])
    axes.set_ylabel("last accuracy, %")
    if other is not None:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)


def _draw_points(axes: Any, keys: Sequence[str], curves: Sequence[Swept], values: Any) -> None:
    """Both keys on axes, accuracy as colour: for values that hardly come twice."""
    scales = ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale))
    places = [_scale(*scale, each) for scale, each in zip(scales, values, strict=True)]
    at = [[places[axis][each.values[axis]] for each in curves] for axis in range(2)]
    drawn = axes.scatter(*at, c=[fmean(each.ends) for each in curves], s=60, cmap="viridis", zorder=3)
    axes.figure.colorbar(drawn, ax=axes, label="last accuracy, %")
    axes.set_xlabel(keys[0])
    axes.set_ylabel(keys[1])


def _draw_bars(axes: Any, curves: Sequence[Swept]) -> None:
    """The best combinations by name; `curves` are sorted."""
    shown = list(reversed(curves[:_MOST_BARS]))
    means = [fmean(each.ends) for each in shown]
    bars = axes.barh(range(len(shown)), means, color=[each.color for each in shown])
    axes.bar_label(bars, [f"{mean:.2f}" for mean in means], padding=3, fontsize=8)
    axes.set_yticks(range(len(shown)), [each.label for each in shown], fontsize=8)
    more = f", the best {_MOST_BARS} of {len(curves)}" if len(curves) > _MOST_BARS else ""
    axes.set_xlabel(f"last accuracy, %{more}")
    axes.margins(x=0.1)


def _scale(axis: Any, set_scale: Any, values: list[Any]) -> dict[Any, float]:
    """Prepare an axis for these values; gives the place of each."""
    from matplotlib.ticker import LogLocator, NullLocator

    names = [_text(value) for value in values]
    if not _is_number(values):
        tilt = {"rotation": 15, "ha": "right"} if sum(map(len, names)) > _LONG else {}
        axis.set_ticks(range(len(values)), names, **tilt)
        return {value: float(place) for place, value in enumerate(values)}
    places = [float(value) for value in values]
    if min(places) > 0 and places[-1] >= _LOG_FROM * places[0]:
        set_scale("log")
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter("{x:g}")
        places = [math.log(value) for value in places]
    gaps = [b - a for a, b in pairwise(places)]
    if not gaps or min(gaps) > _LEAST_GAP * (places[-1] - places[0]):
        axis.set_ticks(values, names)
    return {value: float(value) for value in values}


def _is_number(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _sorted(values: set[Any]) -> list[Any]:
    return sorted(values) if _is_number([*values]) else sorted(values, key=str)


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
