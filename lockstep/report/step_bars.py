"""Draws a step's time by kind of layer and the wait for data, from disks that are fast and slow."""

from __future__ import annotations

from pathlib import Path

_COLORS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#aa3377", "#bbbbbb")
_WAIT = "#cc6677"


def draw_step_bars(path: Path, title: str, kinds: dict[str, float], waits: dict[str, float]) -> None:
    """A bar for each disk: seconds by kind of layer, then seconds of waiting for data."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.6 + 0.7 * len(waits)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    places, left = range(len(waits)), 0.0
    for (kind, seconds), color in zip(kinds.items(), _COLORS, strict=True):
        axes.barh(places, 1e3 * seconds, 0.6, left, color=color, label=kind)
        left += 1e3 * seconds
    lost = [1e3 * wait for wait in waits.values()]
    axes.barh(places, lost, 0.6, left, color=_WAIT, hatch="//", edgecolor="white", label="waiting for data")
    for place, wait in zip(places, lost, strict=True):
        axes.annotate(f"{100 * wait / (left + wait):.0f} % data", (left + wait, place), (4, -3),
                      textcoords="offset points", fontsize=8)  # fmt: skip
    axes.set_xlim(0, 1.15 * (left + max(lost)))
    axes.set_yticks(places, list(waits))
    axes.set_ylim(len(waits) - 0.5, -0.5)
    axes.set_xlabel("milliseconds a step")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=7, frameon=False, fontsize=8)
    figure.suptitle(title, x=0.02, ha="left", fontsize=10)
    figure.savefig(path)
