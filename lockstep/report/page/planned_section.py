"""Predicted communication against compute: a step by number of workers, for each cluster that was planned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from lockstep.report.page.figure import (
    Figures,
    PlotSpec,
    counts_axis,
    is_wide,
    list_axis,
    list_height,
    make_axis,
    series_color,
    series_dash,
    value_axis,
)
from lockstep.report.page.markup import (
    Html,
    Section,
    html_table,
    show_ms,
    show_number,
    show_share,
    tables_of_runs,
    write_heading,
    write_list,
    write_text,
)
from lockstep.report.page.shown_plans import PlannedStep, ShownPlans

_MOST = 24  # plans of one number of workers
_FAR = 20  # times the smallest: on a linear axis that would lie on the ground
_PARTS = (
    ("computing", "c0", "compute_s"),
    ("exchange, exposed", "c1", "exposed_s"),
    ("exchange, hidden", "c2", "hidden_s"),
    ("the rest", "c6", "rest_s"),
)
_HEAD = ("workers", "plan", "step", "at best", "at worst", *(name for name, _, _ in _PARTS))
_FURTHER = ("exposed, of the step", "speed", "speedup", "efficiency", "memory")


def show_planned(files: list[ShownPlans], figures: Figures) -> Section | None:
    """Where the exchange overtakes computing, of all files; then each file by itself."""
    if not files:
        return None
    section = Section("planned", "Communication against compute, predicted")
    section.add(
        write_text(
            "Predicted by lockstep plan, not measured: the best plan for each number of workers. Exposed: "
            "all exchanges while nothing is computed. Hidden: beside computing, so no part of the step's "
            "time. The rest: waiting for other stages and for images, the update, the host."
        )
    )
    names = _name_files(files)
    section.add(*_overview(files, names, figures))
    for file, name in zip(files, names, strict=True):
        section.add(write_heading(name))
        if file.links:
            section.add(write_text(f"{file.cluster}: {file.links}."))
        section.add(*_one_file(file, name, figures))
        if file.why:
            section.add(write_text(f"The best{f': {file.best}' * bool(file.best)}:"), write_list(file.why))
    return section


def _name_files(files: list[ShownPlans]) -> list[str]:
    """What and where; with the file's name if that is not enough to tell them apart."""
    names = Counter(file.name for file in files)
    return [f"{file.name} ({file.path.stem})" if names[file.name] > 1 else file.name for file in files]


def _overview(files: list[ShownPlans], names: list[str], figures: Figures) -> list[Html]:
    """The exposed exchange over computing by workers, a line a file."""
    lines = [file.by_workers for file in files]
    traces: list[dict[str, Any]] = []
    for place, (name, steps) in enumerate(zip(names, lines, strict=True)):
        points = [(step.workers, step.balance) for step in steps if step.balance > 0]
        if len(steps) > 1 and points:
            traces.append(
                {"type": "scatter", "mode": "lines+markers", "name": name}
                | {"x": [x for x, _ in points], "y": [y for _, y in points]}
                | {"line": {"color": series_color(place), "dash": series_dash(place)}}
                | {"marker": {"color": series_color(place)}}
                | {"hovertemplate": "%{x} workers: %{y:.3g}"}
            )
    if len(traces) < 2:
        return []
    counts = sorted({workers for trace in traces for workers in trace["x"]})
    even: dict[str, Any] = {"type": "scatter", "mode": "lines", "name": "as long as computing"}
    even |= {"x": [counts[0], counts[-1]]} | {
        "y": [1, 1],
        "line": {"color": "ink", "dash": "dash", "width": 1},
    }
    values = [1.0, *(value for trace in traces for value in trace["y"])]
    layout = {
        "xaxis": counts_axis("workers", counts, is_wide(counts)),
        "yaxis": value_axis("exchange / computing", values, _FAR),
    }
    title = "Exposed exchange over computing, by workers"
    says = f"Lines of {len(traces)} predictions; above 1 the exchange takes longer than computing."
    shown = {workers for steps in lines for workers in (step.workers for step in steps)}
    by_count = [{step.workers: step.balance for step in steps} for steps in lines]
    rows = [
        (f"{workers:,}", [show_number(found.get(workers), 3) for found in by_count])
        for workers in sorted(shown)
    ]
    turns = ("exchange longer from", [_find_turn(steps) for steps in lines])
    table = tables_of_runs(title, "workers", names, [*rows, turns])
    return [figures.place(PlotSpec(title, says, [even, *traces], layout), table)]


def _find_turn(steps: list[PlannedStep]) -> str:
    """The first number of workers whose exchange takes longer than computing."""
    turn = next((step.workers for step in steps if step.balance > 1), None)
    return f"{turn:,} workers" if turn else f"none up to {steps[-1].workers:,}"


def _one_file(file: ShownPlans, name: str, figures: Figures) -> list[Html]:
    steps = file.by_workers
    if len(steps) > 1:
        title = f"A step by workers: {name}"
        return [figures.place(_lines(title, steps), _table(title, steps))]
    few = file.steps[:_MOST]
    title = f"A step by {steps[0].workers:,} workers, by plan: {name}"
    more = [write_text(f"The first {_MOST} of {len(file.steps)} plans.")] if len(file.steps) > _MOST else []
    return [*more, figures.place(_bars(title, few), _table(title, few))]


def _lines(title: str, steps: list[PlannedStep]) -> PlotSpec:
    """A line for the step and one for each part that takes any time."""
    counts = [step.workers for step in steps]
    shown = [getattr(step, key) for step in steps for key in ("total_s", *(key for *_, key in _PARTS))]
    axis = value_axis("milliseconds a step", [1e3 * value for value in shown], _FAR)
    is_log = axis.get("type") == "log"
    traces: list[dict[str, Any]] = []
    for name, color, key in (("the step", "ink", "total_s"), *_PARTS):
        values = [1e3 * getattr(step, key) for step in steps]
        if not any(values):
            continue
        dash = {"total_s": "dash", "hidden_s": "dot"}.get(key, "solid")
        traces.append(
            {"type": "scatter", "mode": "lines+markers", "name": name, "x": counts}
            | {"y": [value if value or not is_log else None for value in values]}
            | {"line": {"color": color, "dash": dash, "width": 1 if key == "total_s" else 2}}
            | {"marker": {"color": color, "size": 4 if key == "total_s" else 7}}
            | {"customdata": [step.plan for step in steps]}
            | {"hovertemplate": "%{x} workers, %{customdata}: %{y:.4g} ms"}
        )
    layout = {"xaxis": counts_axis("workers", counts, is_wide(counts)), "yaxis": axis}
    says = f"{title}: lines of milliseconds for computing, exchanges and the rest."
    return PlotSpec(title, says, traces, layout, 380)


def _bars(title: str, steps: Sequence[PlannedStep]) -> PlotSpec:
    """Parts of a bar for each plan of one number of workers; what is hidden is a mark, as it adds nothing."""
    names, places = [step.plan for step in steps], list(range(len(steps)))
    traces: list[dict[str, Any]] = []
    for name, color, key in _PARTS:
        values = [1e3 * getattr(step, key) for step in steps]
        if not any(values):
            continue
        is_hidden = key == "hidden_s"
        shape = {"type": "scatter", "mode": "markers"} if is_hidden else {"type": "bar", "orientation": "h"}
        traces.append(
            {**shape, "name": name, "marker": {"color": color}, "x": values, "y": places}
            | {"customdata": names, "hovertemplate": "%{customdata}: %{x:.4g} ms"}
        )
    layout = {"barmode": "stack", "xaxis": make_axis("milliseconds a step"), "yaxis": list_axis(names)}
    says = f"{title}: bars of milliseconds for {len(steps)} plans, in parts."
    return PlotSpec(title, says, traces, layout, list_height(len(steps)))


def _table(title: str, steps: Sequence[PlannedStep]) -> Html:
    rows = [
        (
            f"{step.workers:,}",
            step.plan,
            *map(show_ms, (step.total_s, *step.range_s)),
            *(show_ms(getattr(step, key)) for _, _, key in _PARTS),
            show_share(step.exposed_s / step.total_s),
            show_number(step.img_s, unit="img/s"),
            show_number(step.speedup, 3, "×"),
            show_number(step.efficiency, 3, "%", 100),
            show_number(step.memory_gb, 3, "GB" if step.fits else "GB, too much"),
        )
        for step in steps
    ]
    return html_table(title, (*_HEAD, *_FURTHER), rows)
