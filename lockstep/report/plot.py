"""Draws curves.png: a run's loss, accuracy or own metrics, learning rate and wait for data, by step."""

from __future__ import annotations

import json
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_WORDS = {"val": "validation", "test": "test"}
_TRAIN, _TEST = "#4477aa", "#cc6677"
_LOST, _JOINED = "#aa3377", "#228833"
_WAITING = "#ddaa33"
_STYLES = ("o-", "s--", "^:", "d-.")
_WAIT = 2.0  # percent of the time: a shorter wait for data is not drawn
_NAMED = 30  # with more changes of workers, their marks have no numbers


def draw_curves(directory: Path) -> Path | None:
    """Draw curves.png into a run's directory; None if there is nothing to draw yet."""
    steps, epochs, changes = _rows(directory / "metrics.jsonl")
    if not steps:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    x, half = [row["step"] for row in steps], max(len(steps) // 60, 2)
    waits = _waits(steps, half)
    figure = Figure(figsize=(10, 5.4 if waits else 4.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    counts, split = "accuracy" in steps[0], epochs[-1].get("split", "test") if epochs else "test"
    own = [] if counts else _own_metrics(epochs, split)
    panels = 2 if counts or own else 1
    heights = [4, 1, 1] if waits else [4, 1]
    grid = figure.add_gridspec(len(heights), panels, height_ratios=heights)
    loss = figure.add_subplot(grid[0, 0])
    others = [figure.add_subplot(grid[0, place], sharex=loss) for place in range(1, panels)]
    rate, *below = (figure.add_subplot(grid[row, :], sharex=loss) for row in range(1, len(heights)))
    smooth = f"training, mean of {2 * half + 1} steps"
    loss.plot(x, [row["loss"] for row in steps], color=_TRAIN, alpha=0.25, linewidth=0.8)
    loss.plot(x, _smooth([row["loss"] for row in steps], half), color=_TRAIN, label=smooth)
    if counts:
        percent = [100 * row["accuracy"] for row in steps]
        others[0].plot(x, percent, color=_TRAIN, alpha=0.25, linewidth=0.8)
        others[0].plot(x, _smooth(percent, half), color=_TRAIN)
    if epochs:
        _draw_epochs(loss, others, epochs, split, None if counts else own)
    top = 1.1 * max(row["loss"] for row in steps)  # one bad evaluation must not flatten the curves
    loss.set_ylim(-0.03 * top, top)
    labels = ("loss", "accuracy, %" if counts else f"metrics, {_WORDS[split]}")[:panels]
    for axes, label in zip((loss, *others), labels, strict=True):
        _mark(axes, changes)
        axes.set_ylabel(label)
    rate.plot(x, [row["lr"] for row in steps], color="#777777", linewidth=1.0)
    rate.set_ylim(bottom=0)
    rate.set_ylabel("learning\nrate")
    if below:
        _draw_waits(below[0], x, waits)
    for axes in figure.axes:
        axes.grid(alpha=0.25)
    figure.axes[-1].set_xlabel("step")
    figure.legend(
        *loss.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9
    )
    figure.suptitle(directory.name)
    path, new = directory / "curves.png", directory / ".curves.png"
    figure.savefig(new)
    return new.replace(path)  # atomic, as this process may be killed while it draws


def _draw_epochs(loss: Any, others: list[Any], epochs: list[Row], split: str, own: list[str] | None) -> None:
    """Draw what evaluations found: loss and accuracy, or without accuracy `own` metrics."""
    ends = [row["step"] for row in epochs]
    last = f"{_WORDS[split]}, at the end {epochs[-1][f'{split}_loss']:.4f}"
    if own is None:
        percent = [100 * row[f"{split}_accuracy"] for row in epochs]
        others[0].plot(ends, percent, "o-", color=_TEST, markersize=4)
        last += f" and {percent[-1]:.2f} %"
        if (best := max(percent)) > percent[-1]:
            last += f", best {best:.2f} %"
            at = ends[percent.index(best)]
            others[0].plot(at, best, "o", color=_TEST, markersize=9, fillstyle="none")
    loss.plot(ends, [row[f"{split}_loss"] for row in epochs], "o-", color=_TEST, label=last, markersize=4)
    for name, style in zip(own or (), cycle(_STYLES), strict=False):
        values = [row[f"{split}_{name}"] for row in epochs]
        others[0].plot(ends, values, style, color=_TEST, markersize=4, label=f"{name} {values[-1]:.4g}")
        others[0].legend(frameon=False, fontsize=9)


def _draw_waits(axes: Any, x: list[int], waits: list[float]) -> None:
    axes.plot(x, waits, color=_WAITING, linewidth=1.0)
    axes.set_ylim(0, 100)
    axes.set_ylabel("waiting\nfor data, %")


def _waits(steps: list[Row], half: int) -> list[float]:
    """Percent of the time around each step that was spent waiting for data; empty if it was hardly any."""
    timed = all("data_wait_s" in row and "positions" in row for row in steps)
    if not timed:  # a run of an earlier version
        return []
    seconds = [(row["positions"][1] - row["positions"][0]) / row["img_s"] for row in steps]
    waited = _smooth([row["data_wait_s"] for row in steps], half)
    found = [min(100 * a / max(b, 1e-9), 100.0) for a, b in zip(waited, _smooth(seconds, half), strict=True)]
    return found if max(found) > _WAIT else []


def _own_metrics(epochs: list[Row], split: str) -> list[str]:
    """The names of the user's metrics that every epoch has."""
    found = [set(row) - {f"{split}_loss", f"{split}_accuracy"} for row in epochs]
    start = f"{split}_"
    return (
        sorted(key.removeprefix(start) for key in set.intersection(*found) if key.startswith(start))
        if found
        else []
    )


def _mark(axes: Any, changes: list[Row]) -> None:
    """Draw a line at each step at which workers were lost or joined, and how many there were afterwards."""
    for number, row in enumerate(changes):
        lost = any("joined" not in text for text in row["changes"])
        label = "worker lost, and workers left" if lost else "worker joined"
        known = axes.get_legend_handles_labels()[1]
        color = _LOST if lost else _JOINED
        axes.axvline(row["step"], color=color, linewidth=0.8, linestyle=":", zorder=0,
                     label=None if label in known else label)  # fmt: skip
        if len(changes) <= _NAMED:
            place = row["step"], 1 - 0.04 * (number % 3)
            axes.annotate(str(row["workers"]), place, (2, -8), color=color, fontsize=7,
                          xycoords=("data", "axes fraction"), textcoords="offset points")  # fmt: skip


def _smooth(values: list[float], half: int) -> list[float]:
    """The moving mean: of each value and up to `half` values on either side."""
    sums = [0.0, *accumulate(values)]
    ends = ((max(i - half, 0), min(i + half + 1, len(values))) for i in range(len(values)))
    return [(sums[stop] - sums[start]) / (stop - start) for start, stop in ends]


def _rows(path: Path) -> tuple[list[Row], list[Row], list[Row]]:
    """The rows of steps, of epochs, and of changes of workers."""
    kinds: dict[str, list[Row]] = {"step": [], "epoch": [], "generation": []}
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            kinds[row["kind"]].append(row)
    return kinds["step"], kinds["epoch"], [row for row in kinds["generation"] if row["changes"]]
