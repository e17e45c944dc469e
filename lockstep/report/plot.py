"""curves.png: a run's loss, accuracy and learning rate, drawn from its metrics.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_TRAIN, _TEST = "#4477aa", "#cc6677"
_LOST, _JOINED = "#aa3377", "#228833"
_NAMED = 30  # changes of workers that are named with the number of those who went on


def draw_curves(directory: Path) -> Path | None:
    """Draw curves.png into a run's directory; None where there is nothing to draw yet."""
    steps, epochs, changes = _rows(directory / "metrics.jsonl")
    if not steps:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    loss, accuracy = figure.subplots(1, 2)
    x = [row["step"] for row in steps]
    loss.plot(x, [row["loss"] for row in steps], color=_TRAIN, alpha=0.25, linewidth=0.8)
    loss.plot(x, _smooth([row["loss"] for row in steps]), color=_TRAIN, label="training, smoothed")
    accuracy.plot(x, _smooth([100 * row["accuracy"] for row in steps]), color=_TRAIN, label="training")
    if epochs:
        ends = [row["step"] for row in epochs]
        loss.plot(ends, [row["test_loss"] for row in epochs], "o-", color=_TEST, label="test", markersize=4)
        percent = [100 * row["test_accuracy"] for row in epochs]
        accuracy.plot(ends, percent, "o-", color=_TEST, label="test", markersize=4)
        accuracy.annotate(f"{percent[-1]:.2f} %", (ends[-1], percent[-1]), (-8, -14),
                          textcoords="offset points", ha="right", color=_TEST)  # fmt: skip
    top = 1.1 * max(row["loss"] for row in steps)  # one bad test must not flatten the rest
    loss.set_ylim(-0.03 * top, top)
    for axes in (loss, accuracy):
        _mark(axes, changes)
    _finish(loss, "loss", steps)
    _finish(accuracy, "accuracy, %", steps)
    figure.suptitle(directory.name)
    path = directory / "curves.png"
    figure.savefig(path)
    return path


def _mark(axes: Any, changes: list[Row]) -> None:
    """A line at each step where workers were lost or joined, and who it was."""
    for number, row in enumerate(changes):
        lost = any("joined" not in text for text in row["changes"])
        label = {True: "worker lost", False: "worker joined"}[lost]
        known = axes.get_legend_handles_labels()[1]
        color = _LOST if lost else _JOINED
        axes.axvline(row["step"], color=color, linewidth=0.8, linestyle=":", zorder=0,
                     label=None if label in known else label)  # fmt: skip
        if len(changes) <= _NAMED:
            place = row["step"], 1 - 0.04 * (number % 3)
            axes.annotate(str(row["workers"]), place, (2, -8), color=color, fontsize=7,
                          xycoords=("data", "axes fraction"), textcoords="offset points")  # fmt: skip


def _finish(axes: Any, label: str, steps: list[Row]) -> None:
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.grid(alpha=0.25)
    rate = axes.twinx()
    axes.set_zorder(rate.get_zorder() + 1)  # curves and legend above the learning rate
    axes.patch.set_visible(False)
    axes.legend(loc="best")
    rate.plot([row["step"] for row in steps], [row["lr"] for row in steps], color="#999999", linewidth=0.8)
    rate.set_ylabel("learning rate", color="#999999")
    rate.tick_params(colors="#999999")


def _smooth(values: list[float], keep: float = 0.9) -> list[float]:
    """An exponential average that starts without bias."""
    result, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = keep * total + value, keep * weight + 1.0
        result.append(total / weight)
    return result


def _rows(path: Path) -> tuple[list[Row], list[Row], list[Row]]:
    """Steps, epochs and changes of workers."""
    kinds: dict[str, list[Row]] = {"step": [], "epoch": [], "generation": []}
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            kinds[row["kind"]].append(row)
    return kinds["step"], kinds["epoch"], [row for row in kinds["generation"] if row["changes"]]
