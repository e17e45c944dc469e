"""Draws slow-links.png from the record of benchmarks/slow_links.py: python docs/slow_links.py"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lockstep.spec.record import Record, read_records

HERE = Path(__file__).parent
RECORD = HERE.parent / "benchmarks" / "results" / "slow-links-cpu.json"
MODELS = {"alexnet": "AlexNet", "googlenet": "GoogLeNet", "resnet18": "ResNet-18"}
RATES = {"100mbit": "0.1 Gb/s", "1gbit": "1 Gb/s", "10gbit": "10 Gb/s"}
WORKERS = 4
COMPUTE, OURS, THEIRS = "#bbbbbb", "#4477aa", "#ee6677"


def main() -> None:
    """A panel for every model and rate, a bar for every scheme."""
    record, picture = (*map(Path, sys.argv[1:]), RECORD, HERE / "slow-links.png")[:2]
    steps = dict[tuple[str, str], list[tuple[str, Record]]]()
    for each in read_records(record):
        if each.name.endswith(": step"):
            model, workers, rate, scheme = each.name.removesuffix(": step").split(", ")
            if workers == f"{WORKERS} workers":
                steps.setdefault((model, rate), []).append((scheme, each))
    models = [model for model in MODELS if any(model == known for known, _ in steps)]
    figure = Figure(figsize=(11, 0.7 + 2.1 * len(models)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(models), len(RATES), squeeze=False, sharey=True)
    for row, model in enumerate(models):
        for axes, rate in zip(panels[row], RATES, strict=True):
            draw(axes, steps.get((model, rate), []))
            axes.set_title(f"{MODELS[model]}, {RATES[rate]}", fontsize=9, loc="left")
    for axes in panels[-1]:
        axes.set_xlabel("seconds a step", fontsize=8)
    kinds = {"the same step without the others": COMPUTE, "Lockstep": OURS, "PyTorch": THEIRS}
    handles = [figure.axes[0].barh([0], [0], color=color) for color in kinds.values()]
    figure.legend(handles, list(kinds), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.savefig(picture)


def draw(axes, rows) -> None:  # type: ignore[no-untyped-def]
    """Bars from 0: what a step takes without the others, and what is added by compressing and the link."""
    for place, (scheme, record) in enumerate(rows):
        compute = min(record.details["compute_s"], record.value)
        color = THEIRS if scheme.startswith("DDP") else OURS
        axes.barh(place, record.value, 0.75, color=color)
        axes.barh(place, compute, 0.75, color=COMPUTE)
        axes.errorbar(record.value, place, xerr=spread(record), color="#333333", linewidth=0.8)
        axes.annotate(
            f"{record.value:.3g}",
            (record.spread[1], place),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
        )
    axes.set_yticks(range(len(rows)), [scheme for scheme, _ in rows], fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    axes.margins(x=0.14)
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def spread(record: Record) -> list[list[float]]:
    """The way from the median to the least and the most, as matplotlib wants it."""
    return [[record.value - record.spread[0]], [record.spread[1] - record.value]]


if __name__ == "__main__":
    main()
