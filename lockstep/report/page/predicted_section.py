"""Predicted against measured: seconds of a step, part by part, of runs whose summary has both."""

from __future__ import annotations

from typing import Any

from lockstep.report.page.figure import Figures, PlotSpec, make_axis
from lockstep.report.page.markup import Section, html_table, show_ms, show_number, write_heading, write_text
from lockstep.report.page.shown_run import ShownRun


def show_predicted(runs: list[ShownRun], figures: Figures) -> Section | None:
    """A plot and a table for each run with a prediction."""
    section = Section("predicted", "Predicted against measured")
    for run in runs:
        parts = predicted_parts(run.summary.get("predicted"))
        if not parts:
            continue
        names = [part.removesuffix("_s").replace("_", " ") for part in parts]
        title = f"A step of {run.name}: predicted and measured"
        traces = [
            {"type": "bar", "name": name, "marker": {"color": color}, "x": names}
            | {"y": [1e3 * pair[place] for pair in parts.values()]}
            for place, (name, color) in enumerate((("predicted", "c1"), ("measured", "c0")))
        ]
        layout = {
            "barmode": "group",
            "yaxis": make_axis("milliseconds a step"),
            "xaxis": {"type": "category"},
        }
        says = f"Pairs of bars for {len(parts)} parts of a step: predicted and measured milliseconds."
        rows = [
            (
                name,
                show_ms(before),
                show_ms(after),
                show_number((before - after) / after, 3, "%", 100) if after else None,
            )
            for name, (before, after) in zip(names, parts.values(), strict=True)
        ]
        head = ("part", "predicted", "measured", "error")
        section.add(write_heading(f"{run.name}, {run.plan or f'{run.workers} workers'}"))
        section.add(figures.place(PlotSpec(title, says, traces, layout), html_table(title, head, rows)))
    if not section.parts:
        return None
    section.parts.insert(0, write_text("The error is predicted less measured, over measured."))
    return section


def predicted_parts(found: Any) -> dict[str, tuple[float, float]]:
    """The parts that have a predicted and a measured time; others are not shown."""
    pairs = found.items() if isinstance(found, dict) else ()
    return {
        str(part): (pair[0], pair[1])
        for part, pair in pairs
        if isinstance(pair, list) and len(pair) == 2 and all(type(value) in (int, float) for value in pair)
    }
