"""Draws compute time by kind of layer against the number of images, stacked: milliseconds an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

_COLORS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#aa3377", "#bbbbbb")
_WAIT = "#cc6677"


def draw_layer_stack(
    path: Path,
    title: str,
    sizes: Sequence[int],
    kinds: Mapping[str, Sequence[float]],
    wait_s: Sequence[float],
) -> None:
    """`kinds` has seconds for each of the sizes; `wait_s` seconds of waiting for data, empty if not known."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    places, bottom = range(len(sizes)), [0.0] * len(sizes)
    rows = [(kind, list(found), color) for (kind, found), color in zip(kinds.items(), _COLORS, strict=False)]
    rows += [("waiting for data", list(wait_s), _WAIT)] if any(wait_s) else []
    for kind, found, color in rows:
        height = [1e3 * seconds / size for seconds, size in zip(found, sizes, strict=True)]
        if any(height):
            axes.bar(places, height, 0.7, bottom, color=color, label=kind)
            bottom = [low + more for low, more in zip(bottom, height, strict=True)]
    axes.set_xticks(places, [str(size) for size in sizes])
    axes.set_xlabel("images at once")
    axes.set_ylabel("milliseconds an image, forward and backward")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=7, frameon=False, fontsize=8)
    figure.suptitle(title, x=0.02, ha="left", fontsize=10)
    figure.savefig(path)
