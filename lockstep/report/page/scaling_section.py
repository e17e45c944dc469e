"""Scaling: how many times faster runs of one configuration are by more workers, beside the ideal."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from lockstep.report.page.figure import Figures, PlotSpec, counts_axis, is_wide, make_axis, series_color
from lockstep.report.page.markup import Section, html_table, show_number, write_heading, write_text
from lockstep.report.page.scale_section import add_scaled
from lockstep.report.page.shown_run import ShownRun
from lockstep.spec.record import Record


@dataclass(frozen=True)
class ScalingPoint:
    """Runs of one configuration with as many workers in one way."""

    way: str  # the plan's words without numbers; empty: each worker has the whole model
    workers: int
    img_s: float  # the median of n runs
    n: int
    speedup: float  # over the runs with the fewest workers
    efficiency: float


def show_scaling(runs: list[ShownRun], files: dict[str, list[Record]], figures: Figures) -> Section | None:
    """Speedup and efficiency of every configuration with several worker counts, and of `lockstep scale`."""
    section = Section("scaling", "Scaling")
    for group in _configurations(runs):
        points = scaling_points(group)
        if len({point.workers for point in points}) > 1:
            _add(section, group, points, figures)
    add_scaled(section, files, figures)
    return section if section.parts else None


def scaling_points(runs: list[ShownRun]) -> list[ScalingPoint]:
    """Medians by way and workers, over the fewest workers; runs whose workers changed are left out."""
    speeds: dict[tuple[str, int], list[float]] = {}
    for run in runs:
        if run.keeps_workers:
            speeds.setdefault((way_of(run.plan), run.workers), []).append(run.summary["img_s"])
    if not speeds:
        return []
    way, fewest = min(speeds, key=lambda key: (key[1], key[0]))
    base = median(speeds[way, fewest])
    points = []
    for (name, workers), found in sorted(speeds.items()):
        speedup = median(found) / base
        efficiency = speedup * fewest / workers
        points.append(ScalingPoint(name, workers, median(found), len(found), speedup, efficiency))
    return points


def way_of(plan: str) -> str:
    """`data=2,pipeline=2` as `data, pipeline`: axes with several workers; empty if that is `data` alone."""
    words = [word.partition("=") for word in plan.split(",") if word and not word.endswith("=1")]
    ways = [key if value.isdecimal() else f"{key}={value}" for key, _, value in words]
    return "" if ways == ["data"] else ", ".join(ways)


def _configurations(runs: list[ShownRun]) -> list[list[ShownRun]]:
    """Runs of one identity."""
    groups: dict[str, list[ShownRun]] = {}
    for run in runs:
        groups.setdefault(str(run.summary.get("identity")), []).append(run)
    return list(groups.values())


def _add(section: Section, runs: list[ShownRun], points: list[ScalingPoint], figures: Figures) -> None:
    first, fewest = runs[0], min(point.workers for point in points)
    what = (
        f"{first.setting('model.name')} on {first.setting('data.name')}, batch {first.setting('train.batch')}"
    )
    section.add(write_heading(f"{what}, {len(runs)} runs"))
    base = "one worker" if fewest == 1 else f"{fewest} workers"
    section.add(
        write_text(
            f"Images a second of whole runs over those of {base}; one number for each run, no warm-up left "
            "out. All these runs have one identity, so they train the same thing."
        )
    )
    rows = [
        (
            point.way or "whole model each",
            point.workers,
            point.n,
            show_number(point.img_s, unit="img/s"),
            show_number(point.speedup, 3, "×"),
            show_number(point.efficiency, 3, "%", 100),
        )
        for point in points
    ]
    head = ("plan", "workers", "runs", "speed", "speedup", "efficiency")
    numbers = html_table(f"Scaling of {what}", head, rows)
    workers = sorted({point.workers for point in points})
    ideal: dict[str, Any] = {"type": "scatter", "mode": "lines", "name": "ideal", "x": workers}
    ideal |= {"line": {"color": "ink", "dash": "dash", "width": 1}}
    for title, factor, level in (("Speedup", 1.0, False), ("Efficiency, %", 100.0, True)):
        y = [100.0 if level else workers_ / fewest for workers_ in workers]
        traces = [{**ideal, "y": y}]
        for place, way in enumerate(dict.fromkeys(point.way for point in points)):
            own = [point for point in points if point.way == way]
            values = [factor * (point.efficiency if level else point.speedup) for point in own]
            traces.append(
                {"type": "scatter", "mode": "markers+lines", "name": way or "whole model each"}
                | {"x": [point.workers for point in own], "y": values}
                | {
                    "line": {"color": series_color(place)},
                    "marker": {"size": 9, "color": series_color(place)},
                }
            )
        is_log = is_wide(workers) and not level
        axis = counts_axis(title, y, True) if is_log else make_axis(title, rangemode="tozero")
        layout = {"xaxis": counts_axis("workers", workers, is_wide(workers)), "yaxis": axis}
        says = f"{title.partition(',')[0]} by number of workers, with the ideal as a dashed line."
        name = f"{title.partition(',')[0]} by workers: {what}"
        section.add(figures.place(PlotSpec(name, says, traces, layout), numbers))
