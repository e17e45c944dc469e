"""Timelines: workers lost and joined over a run, lanes in the stages of a pipeline, layers in a step."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from lockstep.report.page.figure import Figures, PlotSpec, list_axis, list_height, make_axis, series_color
from lockstep.report.page.markup import (
    Cell,
    Html,
    Section,
    html_table,
    show_number,
    write_heading,
    write_text,
)
from lockstep.report.page.shown_run import ShownRun

_MOST = 120  # events of a worker
_KINDS = {"forward": "c0", "backward": "c1"}
_WHATS = {"busy": "c0", "spatial": "c1", "channel": "c2"}
_WORDS = {"busy": "computing", "spatial": "exchanging rows", "channel": "exchanging channels"}

Span = tuple[int, str, str, float, float]  # worker, kind, what, milliseconds: from when, how long


def show_timelines(runs: list[ShownRun], figures: Figures) -> Section | None:
    """Of generations, in one plot; of pipelines and layers, one for each run that has it."""
    section = Section("timelines", "Timelines")
    changed = [run for run in runs if len(run.generations) > 1]
    if changed:
        section.add(write_heading("Generations: workers lost and joined"), _generations(changed, figures))
    for run in runs:
        spans = _pipeline(run)
        if spans:
            section.add(write_heading(f"{run.name}: the last step of the pipeline"))
            section.add(write_text("The numbers are lanes, counted from the worker's first."))
            labels = [f"worker {number}, stage {stage['stage']}" for number, stage in enumerate(run.stages)]
            section.add(_draw(f"Pipeline of {run.name}, {run.plan}", labels, spans, figures, _KINDS))
        spans, cut = _layer_spans(run)
        if spans:
            section.add(write_heading(f"{run.name}: layers in the last step, its first lanes"))
            some = f" The first {_MOST} events of each worker." if cut else ""
            section.add(write_text(f"Exchanges lie over the computing that they interrupt.{some}"))
            labels = [f"worker {number}" for number in range(1 + max(span[0] for span in spans))]
            section.add(_draw(f"Layers of {run.name}, {run.plan}", labels, spans, figures, _WHATS))
    return section if section.parts else None


def _generations(runs: list[ShownRun], figures: Figures) -> Html:
    """Workers by step, as stairs."""
    traces: list[dict[str, Any]] = []
    cells: list[tuple[Cell, ...]] = []
    for place, run in enumerate(runs):
        rows = run.generations
        last = {"step": run.summary["steps"], "workers": rows[-1]["workers"], "changes": ["the end"]}
        points = [*rows, last]
        traces.append(
            {"type": "scatter", "mode": "lines+markers", "name": run.name}
            | {
                "line": {"shape": "hv", "color": series_color(place)},
                "marker": {"color": series_color(place)},
            }
            | {"x": [row["step"] for row in points], "y": [row["workers"] for row in points]}
            | {"customdata": ["; ".join(row["changes"]) or "no loss" for row in points]}
            | {"hovertemplate": "step %{x}: %{y} workers<br>%{customdata}"}
        )
        cells += [
            (
                run.name,
                row["generation"],
                row["step"],
                row["workers"],
                "; ".join(row["changes"]),
                show_number(row["seconds"], 3, "s"),
                f"{datetime.fromtimestamp(row['since'], UTC):%Y-%m-%d %H:%M:%S}",
            )
            for row in rows
        ]
    top = 1.1 * max(max(trace["y"]) for trace in traces)
    layout = {
        "xaxis": make_axis("step"),
        "yaxis": make_axis("workers", range=[0, top], dtick=max(1, top // 6)),
    }
    says = "Stairs of the number of workers by step; each change is a generation."
    head = ("run", "generation", "from step", "workers", "what changed", "until the next step", "since, UTC")
    figure = PlotSpec("Workers by step", says, traces, layout)
    return figures.place(figure, html_table("Generations", head, cells))


def _pipeline(run: ShownRun) -> list[Span]:
    stages = run.stages
    starts = [row[2] for stage in stages for row in stage["timeline"]]
    return [
        (worker, kind, f"lane {lane}", 1e3 * (start - min(starts)), 1e3 * (end - start))
        for worker, stage in enumerate(stages)
        for kind, lane, start, end in stage["timeline"]
        if kind in _KINDS
    ]


def _layer_spans(run: ShownRun) -> tuple[list[Span], bool]:
    """Events of layers, at most so many of a worker, and whether there were more."""
    layers = run.layers or {}
    workers = layers.get("timeline", ())
    spans = [
        (worker, what, str(layers["rows"][place]["layer"]), start / 1e3, length / 1e3)
        for worker, events in enumerate(workers)
        for place, what, start, length in events[:_MOST]
        if what in _WHATS
    ]
    return spans, any(len(events) > _MOST for events in workers)


def _draw(title: str, labels: list[str], spans: list[Span], figures: Figures, colors: dict[str, str]) -> Html:
    """A strip for each worker; `colors` has the kinds, later ones drawn over earlier ones."""
    traces: list[dict[str, Any]] = []
    for kind, color in colors.items():
        own = [span for span in spans if span[1] == kind]
        if not own:
            continue
        is_lane = all(span[2].startswith("lane ") for span in own)
        traces.append(
            {"type": "bar", "orientation": "h", "name": _WORDS.get(kind, kind), "width": 0.8}
            | {"marker": {"color": color, "line": {"color": "paper", "width": 0.5 if is_lane else 0}}}
            | {"x": [span[4] for span in own], "base": [span[3] for span in own]}
            | {"y": [span[0] for span in own], "customdata": [span[2] for span in own]}
            | ({"text": [span[2].removeprefix("lane ") for span in own]} if is_lane else {})
            | {
                "textposition": "inside",
                "insidetextanchor": "middle",
                "textangle": 0,
                "constraintext": "inside",
            }
            | {"hovertemplate": "%{customdata}: %{x:.4g} ms from %{base:.4g} ms"}
        )
    axis = make_axis("milliseconds", rangemode="tozero")
    layout = {
        "barmode": "overlay",
        "showlegend": True,
        "xaxis": axis,
        "yaxis": list_axis(labels),
        "uniformtext": {"minsize": 7, "mode": "hide"},
    }
    rows = [
        (
            labels[worker],
            _WORDS.get(kind, kind),
            what,
            show_number(start, unit="ms"),
            show_number(length, unit="ms"),
        )
        for worker, kind, what, start, length in sorted(spans, key=lambda span: (span[0], span[3]))
    ]
    says = f"{title}: a strip of time for each of {len(labels)} workers, {len(spans)} events."
    head = ("worker", "does", "what", "from", "for")
    return figures.place(
        PlotSpec(title, says, traces, layout, list_height(len(labels))), html_table(title, head, rows)
    )
