"""Draws pipeline.png: when each stage of a pipeline computed which lane, in the last step of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_COLORS = {"forward": "#4477aa", "backward": "#cc6677"}


def draw_timeline(directory: Path) -> Path | None:
    """Draw pipeline.png into the directory of a finished run; None if its model was not split."""
    stages = _stages(directory / "summary.json")
    if not stages:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.6 + 0.5 * len(stages)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    start = min(row[2] for stage in stages for row in stage["timeline"])
    end = max(row[3] for stage in stages for row in stage["timeline"]) - start
    for height, stage in enumerate(stages):
        for kind, lane, begin, stop in stage["timeline"]:
            axes.broken_barh(
                [(begin - start, stop - begin)], (height - 0.4, 0.8), color=_COLORS[kind], edgecolor="white"
            )
            if (stop - begin) > 0.012 * end:
                middle = (begin + stop) / 2 - start
                axes.text(middle, height, str(lane), ha="center", va="center", color="white", fontsize=8)
    names = [f"worker {number}, stage {stage['stage']}" for number, stage in enumerate(stages)]
    axes.set_yticks(range(len(stages)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, end)
    axes.set_xlabel("seconds; the numbers are lanes, counted from the worker's first")
    for kind, color in _COLORS.items():
        axes.plot([], [], color=color, linewidth=6, label=kind)
    figure.legend(loc="outside upper right", ncols=2, frameon=False, fontsize=9)
    figure.suptitle(f"{directory.name}: the last step", x=0.02, ha="left")
    path, new = directory / "pipeline.png", directory / ".pipeline.png"
    figure.savefig(new)
    return new.replace(path)  # atomic, as this process may be killed while it draws


def _stages(path: Path) -> list[dict[str, Any]]:
    """The stages in a summary that have a timeline."""
    summary = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return [stage for stage in summary.get("stages", ()) if stage["timeline"]]
