"""Training curves: loss, accuracy and metrics of the user's own, by step, of training and of evaluation."""

from __future__ import annotations

from typing import Any

from lockstep.report.page.figure import Figures, PlotSpec, make_axis, series_color, series_dash
from lockstep.report.page.markup import (
    Cell,
    Html,
    Quantity,
    Section,
    round_digits,
    tables_of_runs,
    write_text,
)
from lockstep.report.page.shown_run import Row, ShownRun

_MOST = 100  # points of a run: each is the mean of as many steps
_WORDS = {"val": "validation", "test": "test"}

Points = list[tuple[int, float]]  # step, value


def show_curves(runs: list[ShownRun], figures: Figures) -> Section | None:
    """A plot of the loss, one of the accuracy, and one for each metric of the user's own."""
    runs = [run for run in runs if run.steps]
    if not runs:
        return None
    section = Section("curves", "Training curves")
    section.add(
        write_text(
            "A line is training; points on a dotted line are evaluation after an epoch. Runs with the same "
            f"bits lie on each other. Of a run with more than {_MOST} steps, a point of the line is a mean "
            "of several."
        )
    )
    named: dict[str, None] = dict.fromkeys(("loss", "accuracy"))
    for run in runs:
        named |= dict.fromkeys(_own_metrics(run))
    for metric in named:
        section.add(*_draw(metric, runs, figures))
    return section


def mean_points(rows: list[Row], key: str) -> Points:
    """The rows' values, or means of equally many steps, at the last step of each."""
    found = [row for row in rows if row.get(key) is not None]
    size = -(-len(found) // _MOST) or 1
    parts = [found[start : start + size] for start in range(0, len(found), size)]
    return [(part[-1]["step"], sum(row[key] for row in part) / len(part)) for part in parts]


def _draw(metric: str, runs: list[ShownRun], figures: Figures) -> list[Html]:
    traces: list[dict[str, Any]] = []
    columns: dict[tuple[str, tuple[tuple[int, float], ...]], list[str]] = {}
    factor = 100.0 if metric == "accuracy" else 1.0
    for place, run in enumerate(runs):
        evaluated = f"{run.split}_{metric}"
        trained = mean_points(run.steps, metric)
        epochs = [(row["step"], row[evaluated]) for row in run.epochs if row.get(evaluated) is not None]
        for what, points in (("training", trained), (_WORDS.get(run.split, run.split), epochs)):
            if not points:
                continue
            columns.setdefault((what, tuple(points)), []).append(run.name)
            look = {"dash": "dot", "width": 1} if points is epochs else {"dash": series_dash(place)}
            line = {"color": series_color(place), **look}
            traces.append(
                {"type": "scatter", "mode": "lines+markers" if points is epochs else "lines", "line": line}
                | {"name": run.name if points is trained else f"{run.name}, {what}"}
                | {"legendgroup": run.name, "showlegend": points is trained or not trained}
                | {"marker": {"color": series_color(place), "size": 8}}
                | {"x": [step for step, _ in points], "y": [factor * value for _, value in points]}
            )
    if not traces:
        return []
    named = {f"{', '.join(names)}: {what}": list(points) for (what, points), names in columns.items()}
    label = "accuracy, %" if metric == "accuracy" else metric
    title = f"{metric[0].upper()}{metric[1:]} by step"
    layout = {"xaxis": make_axis("step"), "yaxis": make_axis(label)}
    says = f"Lines of {metric} by step of {len(runs)} runs; the numbers are in the table below."
    return [figures.place(PlotSpec(title, says, traces, layout), _table(title, named, factor))]


def _table(title: str, columns: dict[str, Points], factor: float) -> Html:
    """A row a step, a column a line; runs with the same numbers share one."""
    steps = sorted({step for points in columns.values() for step, _ in points})
    by_step = [dict(points) for points in columns.values()]
    unit = " %" if factor == 100.0 else ""

    def cell(value: float | None) -> Cell:
        return None if value is None else Quantity(value, round_digits(value * factor) + unit)

    rows = [(f"{step:,}", [cell(found.get(step)) for found in by_step]) for step in steps]
    return tables_of_runs(title, "step", list(columns), rows)


def _own_metrics(run: ShownRun) -> list[str]:
    """Names of the user's metrics in the rows of epochs."""
    start = f"{run.split}_"
    found = {key.removeprefix(start) for row in run.epochs for key in row if key.startswith(start)}
    return sorted(found - {"loss", "accuracy"})
