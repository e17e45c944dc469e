"""Draws which classes are taken for which: a row a label, a column a prediction, by share of the row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

_NUMBERED = 20  # with more classes, cells have no numbers
_NAMED = 60  # with more classes, rows and columns have no names


def draw_confusion(counts: Any, classes: Sequence[str], title: str, path: Path) -> None:
    """Draw counts [label, prediction], an array, and write them to a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    number = len(classes)
    side = min(max(4.0, 0.55 * number + 2), 16.0)
    figure = Figure(figsize=(side + 0.8, side), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    shares = counts / counts.sum(1, keepdims=True).clip(1)
    shown = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(shown, ax=axes, label="share of the class", shrink=0.8)
    if number <= _NAMED:
        axes.set_xticks(range(number), classes, rotation=60, ha="right", fontsize=8)
        axes.set_yticks(range(number), classes, fontsize=8)
    if number <= _NUMBERED:
        for row in range(number):
            for col in range(number):
                if counts[row, col]:
                    color = "white" if shares[row, col] > 0.5 else "black"
                    axes.text(
                        col, row, f"{counts[row, col]:,}", ha="center", va="center", color=color, fontsize=7
                    )
    axes.set_xlabel("predicted")
    axes.set_ylabel("label")
    axes.set_title(title, fontsize=10)
    figure.savefig(path)
