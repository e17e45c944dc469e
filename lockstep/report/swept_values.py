"""Draws accuracy by the values that were swept: lines for one or two keys, points or bars for more."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from statistics import fmean
from typing import Any, Protocol

_COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#222255", "#ee8866")
_MARKERS = "osD^vP*X"
_ON_X = "batch"  # the key that goes on the axis, where it is one of two
_MOST_TICKS = 10
_MOST_BARS = 12
_LOG_FROM = 4  # times the smallest value


class Swept(Protocol):
    """A combination: its values, and the accuracy of each seed."""

    @property
    def label(self) -> str: ...
    @property
    def values(self) -> tuple[Any, ...]: ...
    @property
    def ends(self) -> list[float]: ...


def draw_values(axes: Any, keys: Sequence[str], curves: Sequence[Swept]) -> None:
    """What suits the number of keys and of their values."""
    values = [_sorted({each.values[place] for each in curves}) for place in range(len(keys))]
    if len(keys) == 1:
        _draw_lines(axes, keys, curves, values, 0)
    elif len(keys) == 2:
        x = keys.index(_ON_X) if _ON_X in keys else int(_rank(values[1]) > _rank(values[0]))
        if len(values[1 - x]) <= len(_COLORS):
            _draw_lines(axes, keys, curves, values, x)
        else:
            _draw_points(axes, keys, curves, values)
    else:
        _draw_bars(axes, curves)


def _rank(values: Sequence[Any]) -> tuple[bool, int]:
    """A key of numbers goes before others on the axis, then the one with more values."""
    return _is_number(values), len(values)


def _draw_lines(axes: Any, keys: Sequence[str], curves: Sequence[Swept], values: Any, x: int) -> None:
    """A line for each value of the other key, if there is one; bars for the spread over seeds."""
    other = 1 - x if len(keys) == 2 else None
    places = _scale(axes.xaxis, axes.set_xscale, values[x])
    styles = cycle(zip(_COLORS, _MARKERS, strict=True))
    for value, (color, marker) in zip(values[other] if other is not None else [None], styles, strict=False):
        line = [each for each in curves if other is None or each.values[other] == value]
        line.sort(key=lambda each: places[each.values[x]])
        means = [fmean(each.ends) for each in line]
        spread = [[m - min(e.ends) for m, e in zip(means, line, strict=True)],
                  [max(e.ends) - m for m, e in zip(means, line, strict=True)]]  # fmt: skip
        at = [places[each.values[x]] for each in line]
        label = None if other is None else f"{keys[other]} {_text(value)}"
        axes.errorbar(at, means, spread, color=color, marker=marker, markersize=5, capsize=3, label=label)
    axes.set_xlabel(keys[x])
    axes.set_ylabel("accuracy at the end, %")
    if other is not None:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)


def _draw_points(axes: Any, keys: Sequence[str], curves: Sequence[Swept], values: Any) -> None:
    """Both keys on axes, accuracy as colour: for values that hardly come twice."""
    scales = ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale))
    places = [_scale(*scale, each) for scale, each in zip(scales, values, strict=True)]
    at = [[places[axis][each.values[axis]] for each in curves] for axis in range(2)]
    drawn = axes.scatter(*at, c=[fmean(each.ends) for each in curves], s=60, cmap="viridis", zorder=3)
    axes.figure.colorbar(drawn, ax=axes, label="accuracy at the end, %")
    axes.set_xlabel(keys[0])
    axes.set_ylabel(keys[1])


def _draw_bars(axes: Any, curves: Sequence[Swept]) -> None:
    """The best combinations by name; `curves` are sorted."""
    shown = list(reversed(curves[:_MOST_BARS]))
    means = [fmean(each.ends) for each in shown]
    bars = axes.barh(range(len(shown)), means, color=_COLORS[0])
    axes.bar_label(bars, [f"{mean:.2f}" for mean in means], padding=3, fontsize=8)
    axes.set_yticks(range(len(shown)), [each.label for each in shown], fontsize=8)
    more = f", the best {_MOST_BARS} of {len(curves)}" if len(curves) > _MOST_BARS else ""
    axes.set_xlabel(f"accuracy at the end, %{more}")
    axes.margins(x=0.1)


def _scale(axis: Any, set_scale: Any, values: list[Any]) -> dict[Any, float]:
    """Prepare an axis for these values; gives the place of each."""
    from matplotlib.ticker import NullLocator

    if not _is_number(values):
        axis.set_ticks(range(len(values)), [_text(value) for value in values])
        return {value: float(place) for place, value in enumerate(values)}
    if min(values) > 0 and max(values) >= _LOG_FROM * min(values):
        set_scale("log")
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter("{x:g}")
    if len(values) <= _MOST_TICKS:
        axis.set_ticks(values, [_text(value) for value in values])
    return {value: float(value) for value in values}


def _is_number(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _sorted(values: set[Any]) -> list[Any]:
    return sorted(values) if _is_number([*values]) else sorted(values, key=str)


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
