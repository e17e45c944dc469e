"""Draws a convolution as a matrix times the image: a row for each result, a column for each pixel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def draw_toeplitz(
    path: Path,
    taps: Sequence[Sequence[int]],
    image: tuple[int, int],
    result: tuple[int, int],
    kernel: int,
) -> None:
    """`taps` says which value of the filter stands where, or -1 for a zero; beside it the filter itself."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows, columns = len(taps), len(taps[0])
    wide = max(0.34 * (columns + kernel + 4) + 1.4, 7.6)  # titles need some room, too
    high = max(0.34 * max(rows, kernel) + 1.6, 3.0)
    figure = Figure(figsize=(wide, high), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    matrix, filters = figure.subplots(1, 2, gridspec_kw={"width_ratios": [columns, kernel]})
    colors = colormaps["viridis"]
    shades = [colors(0.12 + 0.83 * tap / max(kernel**2 - 1, 1)) for tap in range(kernel**2)]
    for y, row in enumerate(taps):
        for x, tap in enumerate(row):
            _draw_value(matrix, x, y, tap, shades, kernel)
    for tap in range(kernel**2):
        _draw_value(filters, tap % kernel, tap // kernel, tap, shades, kernel)
    _frame(matrix, columns, rows)
    _frame(filters, kernel, kernel)
    for edge in range(image[1], columns, image[1]):
        matrix.axvline(edge - 0.5, color="black", linewidth=0.8)
    for edge in range(result[1], rows, result[1]):
        matrix.axhline(edge - 0.5, color="black", linewidth=0.8)
    matrix.set_xticks(range(columns), [f"{x // image[1]},{x % image[1]}" for x in range(columns)], fontsize=6)
    matrix.set_yticks(range(rows), [f"{y // result[1]},{y % result[1]}" for y in range(rows)], fontsize=7)
    matrix.tick_params(axis="x", rotation=90)
    matrix.set_xlabel("pixel of the image (row, column), taken as one vector")
    matrix.set_ylabel("result (row, column)")
    matrix.set_title("result = matrix × image: empty places are zeros", fontsize=10)
    filters.set_xticks([])
    filters.set_yticks([])
    filters.set_title("filter", fontsize=10)
    figure.savefig(path)


def _draw_value(panel: Any, x: int, y: int, tap: int, shades: Sequence[Any], kernel: int) -> None:
    from matplotlib.patches import Rectangle

    shade = shades[tap] if tap >= 0 else "white"
    panel.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=shade, edgecolor="#cccccc", linewidth=0.5))
    if tap >= 0:
        ink = "white" if tap < 0.55 * kernel**2 else "black"
        name = f"{tap // kernel}{tap % kernel}" if kernel <= 10 else str(tap)
        panel.text(x, y, name, ha="center", va="center", fontsize=7, color=ink)


def _frame(panel: Any, columns: int, rows: int) -> None:
    panel.set_xlim(-0.5, columns - 0.5)
    panel.set_ylim(rows - 0.5, -0.5)
    panel.set_aspect("equal")
