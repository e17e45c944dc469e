"""Draws time by kind of layer against the number of images, and where layers become slow if it is small."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_COLORS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#aa3377", "#bbbbbb")
_LINES = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#555555", "#ee8866")
_MARKS = "osD^vPX*"
_LOAD = "#cc6677"
_LONGEST = 36  # letters of a layer's name
MOST_LINES = len(_LINES)


def draw_layer_stack(
    path: Path,
    title: str,
    sizes: Sequence[int],
    kinds: Mapping[str, Sequence[float]],
    load_s: Sequence[float],
    rates: Mapping[str, Sequence[float]],
    reached: float,
) -> None:
    """`kinds` and `load_s` are seconds for each of the sizes, `load_s` empty if it is not known.

    `rates` has the images a second of some layers over their best, drawn if there are several sizes, with a
    line at the share `reached`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = 2 if len(sizes) > 1 else 1
    size_in = max(9, 2.5 + 0.7 * len(sizes)), 0.4 + 4.1 * panels
    figure = Figure(figsize=size_in, dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    above, *below = figure.subplots(panels, squeeze=False)[:, 0]
    _draw_kinds(above, sizes, kinds, load_s)
    for axes in below:
        _draw_rates(axes, sizes, rates, reached)
    for axes in (above, *below):
        axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
        axes.set_xlim(-0.6, len(sizes) - 0.4)
        axes.set_xlabel("images at once")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
        place = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5)}
        axes.legend(**place, frameon=False, fontsize=8, reverse=axes is above)  # as bars lie on each other
    figure.suptitle(title, x=0.02, ha="left", fontsize=10)
    figure.savefig(path)


def _draw_kinds(
    axes: Any, sizes: Sequence[int], kinds: Mapping[str, Sequence[float]], load_s: Sequence[float]
) -> None:
    """Bars of kinds, loading on top of them, and above each its height with and without that."""
    places, bottom = range(len(sizes)), [0.0] * len(sizes)
    for (kind, found), color in zip(kinds.items(), _COLORS, strict=False):
        height = [1e3 * seconds / size for seconds, size in zip(found, sizes, strict=True)]
        if any(height):
            axes.bar(places, height, 0.7, bottom, color=color, label=kind)
            bottom = [low + more for low, more in zip(bottom, height, strict=True)]
    texts, top = [three_digits(height) for height in bottom], bottom
    if load_s:
        loading = [1e3 * seconds / size for seconds, size in zip(load_s, sizes, strict=True)]
        look = {"color": _LOAD, "hatch": "//", "edgecolor": "white", "linewidth": 0}
        axes.bar(places, loading, 0.7, bottom, label="loading data", **look)
        top = [low + more for low, more in zip(bottom, loading, strict=True)]
        texts = [f"{three_digits(high)}\n({text})" for high, text in zip(top, texts, strict=True)]
    for place, high, text in zip(places, top, texts, strict=True):
        axes.annotate(text, (place, high), (0, 4), textcoords="offset points", ha="center", fontsize=7)
    axes.set_ylim(0, 1.15 * max(top))
    axes.set_ylabel("milliseconds an image, forward\nand backward" + " (and without loading)" * bool(load_s))


def _draw_rates(
    axes: Any, sizes: Sequence[int], rates: Mapping[str, Sequence[float]], reached: float
) -> None:
    """A line for each layer, and one for the share below which it has left its roofline."""
    for (name, found), color, mark in zip(rates.items(), _LINES, _MARKS, strict=False):
        label = name if len(name) <= _LONGEST else f"…{name[1 - _LONGEST :]}"
        axes.plot(range(len(sizes)), found, color=color, marker=mark, markersize=5, label=label)
    axes.axhline(reached, color="#555555", linestyle="--", linewidth=1, label=f"{100 * reached:.0f} %")
    axes.set_ylim(0, 1.05)
    axes.set_ylabel("images a second of a layer,\nshare of its best")


def three_digits(number: float) -> str:
    """Three digits, or all before the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:#.3g}"
