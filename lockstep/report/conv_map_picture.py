"""Draws which algorithm wins by channels, size and kernel, with layers of networks as points on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import Any

_COLORS = ("#bbbbbb", "#88ccee", "#4477aa", "#ddcc77", "#ee8866", "#aa4499")  # told apart by colour-blind too
_DARK = ("#4477aa", "#aa4499")
_MARKS = ("o", "s", "^", "D")


@dataclass(frozen=True)
class DrawnCell:
    """Who wins at a place of the map, and how many times faster than im2col that is."""

    kernel: int
    channels: int
    size: int
    winner: str
    gain: float | None


def draw_conv_map(
    path: Path,
    title: str,
    names: Sequence[str],
    axes_values: tuple[Sequence[int], Sequence[int]],
    cells: Sequence[DrawnCell],
    points: Mapping[str, Sequence[tuple[int, float, int]]],
) -> None:
    """A panel for every kernel. `names` are the algorithms in order; points are (kernel, channels, size)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    channels, sizes = axes_values
    kernels = sorted({cell.kernel for cell in cells})
    figure = Figure(figsize=(2.5 * len(kernels) + 0.9, 5.2), dpi=120)
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(kernels), sharey=True, squeeze=False)[0]
    for panel, kernel in zip(panels, kernels, strict=True):
        _draw_cells(panel, [cell for cell in cells if cell.kernel == kernel], names, channels, sizes)
        for mark, (network, layers) in zip(_MARKS, points.items(), strict=False):
            _draw_points(
                panel, network, mark, [each[1:] for each in layers if each[0] == kernel], axes_values
            )
        panel.set_title(f"{kernel} × {kernel} filters", fontsize=10)
        panel.set_xticks(range(len(sizes)), [str(size) for size in sizes])
        panel.set_xlabel("pixels along a side")
    panels[0].set_yticks(range(len(channels)), [str(count) for count in channels])
    panels[0].set_ylabel("channels in and out")
    figure.subplots_adjust(left=0.9 / figure.get_figwidth(), right=0.985, bottom=0.2, top=0.78, wspace=0.08)
    _add_legends(figure, panels, names, {cell.winner for cell in cells})
    figure.text(0.5, 0.955, f"Fastest algorithm: {title}", ha="center", fontsize=11)
    note = (
        "Numbers: times faster than im2col + GEMM. Marks: layers, at their mean channels and result's side."
    )
    figure.text(0.5, 0.015, note, ha="center", fontsize=8, color="#444444")
    figure.savefig(path)


def _add_legends(figure: Any, panels: Any, names: Sequence[str], used: set[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=_COLORS[place], label=name) for place, name in enumerate(names) if name in used]
    handles.append(Patch(facecolor="white", edgecolor="#999999", hatch="///", label="not measured"))
    marks: dict[str, Any] = {}
    for panel in panels:
        marks |= dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    look: dict[str, Any] = {"frameon": False, "fontsize": 9}
    figure.legend(handles=handles, loc="center", bbox_to_anchor=(0.5, 0.9), ncols=len(handles), **look)
    figure.legend(marks.values(), marks, loc="center", bbox_to_anchor=(0.5, 0.075), ncols=4, **look)


def _draw_cells(
    panel: Any,
    cells: Sequence[DrawnCell],
    names: Sequence[str],
    channels: Sequence[int],
    sizes: Sequence[int],
) -> None:
    from matplotlib.patches import Rectangle

    panel.set_xlim(-0.5, len(sizes) - 0.5)
    panel.set_ylim(-0.5, len(channels) - 0.5)
    panel.add_patch(Rectangle((-0.5, -0.5), len(sizes), len(channels), facecolor="white", edgecolor="#999999",
                              hatch="///", linewidth=0))  # fmt: skip
    for cell in cells:
        x, y = sizes.index(cell.size), channels.index(cell.channels)
        color = _COLORS[names.index(cell.winner)]
        panel.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=color, edgecolor="white", linewidth=1))
        if cell.gain is not None and cell.gain >= 1.05:
            panel.text(x + 0.44, y + 0.44, f"{cell.gain:.1f}", ha="right", va="top", fontsize=7,
                       color="white" if color in _DARK else "black")  # fmt: skip


def _draw_points(
    panel: Any,
    network: str,
    mark: str,
    layers: Sequence[tuple[float, int]],
    axes_values: tuple[Sequence[int], Sequence[int]],
) -> None:
    channels, sizes = axes_values
    places = sorted({(_place(size, sizes), _place(count, channels)) for count, size in layers})
    look = {"markerfacecolor": "white", "markeredgecolor": "black", "markeredgewidth": 0.9, "markersize": 4.5}
    panel.plot([x for x, _ in places], [y for _, y in places], mark, label=network, **look)


def _place(value: float, ticks: Sequence[int]) -> float:
    """Where a value lies between the ticks, which double or quadruple; at most half a cell beyond them."""
    step = log2(ticks[1] / ticks[0])
    return min(max(log2(value / ticks[0]) / step, -0.4), len(ticks) - 0.6)
