"""Draws slow-links.png from the record of benchmarks/slow_links.py, and prints the tables of compression.md.

python docs/slow_links.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lockstep.spec.record import Record, read_records

HERE = Path(__file__).parent
RECORD = HERE.parent / "benchmarks" / "results" / "slow-links-cpu.json"
SCHEMES = ("none", "bf16", "fp8", "int8", "top:0.01", "rank:4", "DDP", "DDP bf16", "DDP PowerSGD 4")
MODELS = {"alexnet": "AlexNet", "googlenet": "GoogLeNet", "resnet18": "ResNet-18"}
RATES = {"100mbit": "0.1 Gb/s", "1gbit": "1 Gb/s", "10gbit": "10 Gb/s"}
DRAWN = 4  # workers
COMPUTE, OURS, THEIRS = "#bbbbbb", "#4477aa", "#ee6677"
Case = tuple[str, int, str]  # model, workers, rate
Schemes = dict[str, Record]


def main() -> None:
    """The tables of a record, then its picture."""
    record, picture = (*map(Path, sys.argv[1:]), *(RECORD, HERE / "slow-links.png")[len(sys.argv) - 1 :])
    steps, exchanges = read_cases(record, "step"), read_cases(record, "exchange")
    print_table("Seconds of a step", steps, lambda each: each.value)
    print_table("Seconds of an exchange", exchanges, lambda each: each.value)
    print_table("MB that a worker sends in a step", steps, lambda each: each.details["sent_mb"], None)
    share = {
        case: {name: each for name, each in schemes.items() if "planned_s" in each.details}
        for case, schemes in steps.items()
    }
    print_table("Predicted over measured", share, lambda each: each.details["planned_s"] / each.value, None)
    draw_all({(model, rate): found for (model, size, rate), found in steps.items() if size == DRAWN}, picture)


def read_cases(path: Path, kind: str) -> dict[Case, Schemes]:
    """Records of steps or of exchanges, by case and scheme; slow links first."""
    found = dict[Case, Schemes]()
    for each in read_records(path):
        title, _, what = each.name.rpartition(": ")
        if what == kind:
            model, workers, rate, scheme = title.split(", ")
            found.setdefault((model, int(workers.split()[0]), rate), {})[scheme] = each
    places = {model: place for place, model in enumerate(MODELS)}
    order = {rate: place for place, rate in enumerate(RATES)}
    return dict(sorted(found.items(), key=lambda item: (places[item[0][0]], item[0][1], order[item[0][2]])))


def print_table(
    title: str,
    cases: Mapping[Case, Schemes],
    number: Callable[[Record], float],
    best: Callable[..., Any] | None = min,
) -> None:
    """A row for each case, a column for each scheme; the best is bold."""
    columns = [name for name in SCHEMES if any(name in schemes for schemes in cases.values())]
    print(f"\n{title}:\n\n| | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for (model, workers, rate), schemes in cases.items():
        values = {name: number(each) for name, each in schemes.items()}
        texts = {name: f"{value:.3g}" for name, value in values.items()}
        if best and values:
            name = best(values, key=values.__getitem__)
            texts[name] = f"**{texts[name]}**"
        cells = " | ".join(texts.get(name, "") for name in columns)
        print(f"| {MODELS[model]}, {workers} workers, {RATES[rate]} | {cells} |")


def draw_all(cases: Mapping[tuple[str, str], Schemes], path: Path) -> None:
    """A panel for every model and rate, a bar for every scheme."""
    models = [model for model in MODELS if any(model == known for known, _ in cases)]
    figure = Figure(figsize=(11, 0.7 + 2.1 * len(models)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    names = [name for name in SCHEMES if any(name in schemes for schemes in cases.values())]
    panels = figure.subplots(len(models), len(RATES), squeeze=False, sharey=True)
    for row, model in enumerate(models):
        for axes, rate in zip(panels[row], RATES, strict=True):
            draw(axes, cases.get((model, rate), {}), names)
            axes.set_title(f"{MODELS[model]}, {RATES[rate]}", fontsize=9, loc="left")
    panels[0][0].invert_yaxis()  # all share it
    for axes in panels[-1]:
        axes.set_xlabel("seconds of a step", fontsize=8)
    kinds = {"the same step without other workers": COMPUTE, "Lockstep": OURS, "PyTorch": THEIRS}
    handles = [panels[0][0].barh([0], [0], color=color) for color in kinds.values()]
    figure.legend(handles, list(kinds), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.savefig(path)


def draw(axes: Any, schemes: Schemes, names: list[str]) -> None:
    """Bars from 0: what a step takes without others, and what is added by compressing and by the link."""
    for scheme, record in schemes.items():
        place = names.index(scheme)
        low, high = record.spread
        axes.barh(place, record.value, 0.75, color=THEIRS if scheme.startswith("DDP") else OURS)
        axes.barh(place, min(record.details["compute_s"], record.value), 0.75, color=COMPUTE)
        axes.plot([low, high], [place, place], color="#333333", linewidth=0.8)
        text = f"{record.value:.3g}"
        axes.annotate(text, (high, place), (4, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    axes.margins(x=0.14)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
