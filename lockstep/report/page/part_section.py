"""What the parts of a step take: layers over workers, stages of a pipeline, exchanges beside computing."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.report.page.figure import Figures, PlotSpec, list_axis, list_height, make_axis
from lockstep.report.page.markup import (
    Cell,
    Html,
    Section,
    html_table,
    show_ms,
    show_number,
    show_share,
    write_heading,
    write_text,
)
from lockstep.report.page.shown_run import Row, ShownRun

_MOST = 40  # bars of layers; the rest is one bar
_COMPUTE, _EXCHANGE = "c0", "c1"


def show_layers(runs: list[ShownRun], figures: Figures) -> Section | None:
    """A plot for each run whose layers or stages were timed."""
    section = Section("layers", "Layers and stages")
    for run in runs:
        if run.layers:
            section.add(write_heading(f"{run.name}: layers"), *_layers(run, figures))
        if run.stages:
            section.add(write_heading(f"{run.name}: stages of the pipeline"), *_stages(run, figures))
    return section if section.parts else None


def show_traffic(runs: list[ShownRun], figures: Figures) -> Section | None:
    """Computing and exchanging in a step, by number of workers, of runs that timed both."""
    timed = [(run, *times) for run in runs if (times := step_parts(run))]
    if not timed:
        return None
    with_exchange = {run.summary.get("identity") for run, *_ in timed}
    alone = [
        (run, run.train_s / len(run.steps), 0.0)
        for run in runs
        if run.workers == 1 and not run.plan and run.train_s and run.summary.get("identity") in with_exchange
    ]
    rows = sorted([*alone, *timed], key=lambda row: (row[0].workers, row[0].name))
    names = [f"{run.workers} · {run.plan or 'one worker'} · {run.name}" for run, *_ in rows]
    section = Section("communication", "Communication against compute")
    section.add(
        write_text(
            "Seconds of a step, of the worker that takes longest. Of layers over workers: exchanges, with "
            "the waiting for others; where only these were timed, computing is the rest of the mean step. "
            "Of a pipeline: waiting for neighbours, which has the bubble in it. Of one worker: the mean step."
        )
    )
    cells = [
        (
            name,
            run.workers,
            show_ms(busy),
            show_ms(spent),
            show_share(spent / (busy + spent) if busy + spent else None),
        )
        for name, (run, busy, spent) in zip(names, rows, strict=True)
    ]
    head = ("workers, plan, run", "workers", "computing", "exchanging or waiting", "share of it")
    title = "Computing and exchanging in a step, by workers"
    figure = _bars(title, names, [busy for _, busy, _ in rows], [spent for *_, spent in rows])
    section.add(figures.place(figure, html_table(title, head, cells)))
    return section


def step_parts(run: ShownRun) -> tuple[float, float] | None:
    """Seconds a step: computing, and exchanging or waiting for others; None if it did not time them."""
    if run.layers:
        busy_s, exchange_s = run.layers["busy_s"], run.layers["exchange_s"]
        rest_s = run.train_s / len(run.steps) - exchange_s if run.train_s else 0.0
        return busy_s or max(rest_s, 0.0), exchange_s
    if run.stages:
        longest = max(run.stages, key=lambda stage: stage["busy_s"])
        return longest["busy_s"], longest["waited_s"]
    return None


def _layers(run: ShownRun, figures: Figures) -> list[Html]:
    layers = run.layers or {}
    rows, shown = layers["rows"], _fewer(layers["rows"])
    cells = [
        (
            row["layer"],
            str(row.get("rule", "")),
            show_ms(row["busy_s"]),
            show_ms(row["exchange_s"]),
            show_number(row["channel_mb"] + row["spatial_mb"], 3, "MB"),
            show_number(row.get("work_mmac"), 3),
            show_share(row.get("share")),
        )
        for row in rows
    ]
    head = ("layer", "rule", "computing", "exchanging", "sent", "million multiplications", "cut")
    title = f"Time by layer in a step: {run.name}, {run.plan}"
    words = [f"{100 * layers['share']:.0f} % of the multiplications are cut.", _how_timed(layers)]
    parts, numbers = [write_text(" ".join(words))], html_table(title, head, cells)
    if not shown:
        return [*parts, numbers]
    names, busy, spent = zip(
        *((row["layer"], row["busy_s"], row["exchange_s"]) for row in shown), strict=True
    )
    return [*parts, figures.place(_bars(title, names, busy, spent), numbers)]


def _how_timed(layers: Row) -> str:
    if not layers["busy_s"]:
        return "Layers were not timed one by one, only what they exchange."
    launches = " What is timed is launches, not work." if layers.get("timed") == "launches" else ""
    return f"Each time is the largest over workers.{launches}"


def _stages(run: ShownRun, figures: Figures) -> list[Html]:
    stages = run.stages
    names = [f"worker {number}, stage {stage['stage']}" for number, stage in enumerate(stages)]
    cells: list[tuple[Cell, ...]] = [
        (
            name,
            show_ms(stage["busy_s"]),
            show_ms(stage["waited_s"]),
            show_share(stage["bubble"]),
            show_number(stage["sent_mb"], 3, "MB"),
            stage["lanes_in_flight"],
            show_number(stage["peak_mb"], 3, "MB"),
        )
        for name, stage in zip(names, stages, strict=True)
    ]
    head = (
        "worker",
        "computing",
        "waiting",
        "share of waiting",
        "sent a step",
        "lanes in flight",
        "peak memory",
    )
    title = f"Time by stage in a step: {run.name}, {run.plan}"
    figure = _bars(title, names, [row["busy_s"] for row in stages], [row["waited_s"] for row in stages])
    return [figures.place(figure, html_table(title, head, cells))]


def _bars(title: str, names: Sequence[str], busy: Sequence[float], spent: Sequence[float]) -> PlotSpec:
    """Two parts of a bar for each name."""
    traces = [
        {"type": "bar", "orientation": "h", "name": name, "marker": {"color": color}}
        | {"x": [1e3 * value for value in values], "y": list(range(len(names)))}
        | {"customdata": list(names), "hovertemplate": "%{customdata}: %{x:.4g} ms"}
        for name, values, color in (
            ("computing", busy, _COMPUTE),
            ("exchanging or waiting", spent, _EXCHANGE),
        )
    ]
    layout = {"barmode": "stack", "xaxis": make_axis("milliseconds a step"), "yaxis": list_axis(list(names))}
    says = f"{title}: bars of milliseconds for {len(names)} rows, in two parts."
    return PlotSpec(title, says, traces, layout, list_height(len(names)))


def _fewer(rows: list[Row]) -> list[Row]:
    """The rows that take longest, in their order, and one for the rest; none of those that take no time."""
    rows = [row for row in rows if row["busy_s"] + row["exchange_s"]]
    if len(rows) <= _MOST:
        return rows
    times = [row["busy_s"] + row["exchange_s"] for row in rows]
    longest = set(sorted(range(len(rows)), key=lambda place: -times[place])[:_MOST])
    rest = [row for place, row in enumerate(rows) if place not in longest]
    sums = {key: sum(row[key] for row in rest) for key in ("busy_s", "exchange_s")}
    return [*(rows[place] for place in sorted(longest)), {"layer": f"{len(rest)} others", **sums}]
