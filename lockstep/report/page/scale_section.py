"""What `lockstep scale` measured, strong or weak: speedup and efficiency by workers, and the prediction."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lockstep.report.page.figure import Figures, PlotSpec, counts_axis, is_wide, make_axis
from lockstep.report.page.markup import Section, html_table, show_ms, show_number, write_heading, write_text
from lockstep.spec.record import Record

_NUMBERS = ("workers", "batch", "img_s")
_SAYS = {
    "strong": "Strong scaling: the same batch by more workers.",
    "weak": "Weak scaling: batch and lanes grow with the workers.",
}


@dataclass(frozen=True)
class ScaledStep:
    """A step by a number of workers: the median of n, fastest and slowest."""

    workers: int
    batch: int
    step_s: float
    spread_s: tuple[float, float]
    n: int
    predicted_s: float | None
    weights: str


def add_scaled(section: Section, files: dict[str, list[Record]], figures: Figures) -> None:
    """Two plots and a table for every measurement of `lockstep scale` with several numbers of workers."""
    for file, records in files.items():
        for (kind, model, hardware), steps in scaled_steps(records).items():
            if len(steps) > 1:
                what = f"{model}, {kind} scaling"
                section.add(write_heading(f"{what}, {hardware} ({file})"))
                _add(section, what, kind, steps, figures)


def scaled_steps(records: list[Record]) -> dict[tuple[str, str, str], list[ScaledStep]]:
    """Of records that `lockstep scale` wrote, the steps by workers: by kind, model and hardware."""
    groups: dict[tuple[str, str, str], dict[int, ScaledStep]] = {}
    for record in records:
        step = _read_step(record)
        if step:
            key = str(record.details["scaling"]), str(record.details["model"]), record.hardware
            groups.setdefault(key, {})[step.workers] = step
    return {key: [steps[workers] for workers in sorted(steps)] for key, steps in groups.items()}


def _read_step(record: Record) -> ScaledStep | None:
    details = record.details
    if not isinstance(details, dict) or details.get("scaling") not in _SAYS or "model" not in details:
        return None
    if not all(_is_above_0(value) for value in (record.value, *record.spread)):
        return None
    if not all(_is_above_0(details.get(key)) for key in _NUMBERS):
        return None
    guess: Any = details.get("predicted_s")
    return ScaledStep(
        int(details["workers"]),
        int(details["batch"]),
        record.value,
        record.spread,
        record.n,
        float(guess) if _is_above_0(guess) else None,
        str(details.get("weights_sha256", "")),
    )


def _is_above_0(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0


def _add(section: Section, what: str, kind: str, steps: list[ScaledStep], figures: Figures) -> None:
    first = steps[0]
    words = [_SAYS[kind], "Medians of steps, with the fastest and the slowest."]
    if kind == "strong" and first.weights:
        same = len({step.weights for step in steps}) == 1
        words.append("The weights are the same bits." if same else "The weights DIFFER.")
    section.add(write_text(" ".join(words)))
    base = first.batch / first.step_s / first.workers  # images a second of one worker
    rows = [
        (
            f"{step.workers:,}",
            step.batch,
            show_ms(step.step_s),
            *map(show_ms, step.spread_s),
            step.n,
            show_number(step.batch / step.step_s, unit="img/s"),
            show_number(_efficiency(step, step.step_s, base) * step.workers / first.workers, 3, "×"),
            show_number(_efficiency(step, step.step_s, base), 3, "%", 100),
            show_ms(step.predicted_s) if step.predicted_s else None,
            show_number(step.predicted_s / step.step_s - 1, 3, "%", 100) if step.predicted_s else None,
        )
        for step in steps
    ]
    head = ("workers", "batch", "step", "fastest", "slowest", "n", "speed", "speedup", "efficiency")
    table = html_table(f"Scaling of {what}", (*head, "predicted", "error"), rows)
    for name in ("Speedup", "Efficiency"):
        section.add(figures.place(_plot(name, what, steps, base), table))


def _efficiency(step: ScaledStep, seconds: float, base: float) -> float:
    return step.batch / seconds / step.workers / base


def _plot(name: str, what: str, steps: list[ScaledStep], base: float) -> PlotSpec:
    """Measured with its spread, predicted and ideal."""
    is_share, first = name == "Efficiency", steps[0].workers

    def value(step: ScaledStep, seconds: float) -> float:
        return _efficiency(step, seconds, base) * (100 if is_share else step.workers / first)

    counts = [step.workers for step in steps]
    found = [value(step, step.step_s) for step in steps]
    lows, highs = ([value(step, step.spread_s[place]) for step in steps] for place in (1, 0))
    spread = {"type": "data", "symmetric": False, "color": "c0", "thickness": 1, "width": 4}
    spread["array"] = [max(high - y, 0) for high, y in zip(highs, found, strict=True)]
    spread["arrayminus"] = [max(y - low, 0) for low, y in zip(lows, found, strict=True)]
    ideal = [100.0 if is_share else count / first for count in counts]
    traces: list[dict[str, Any]] = [
        {"type": "scatter", "mode": "lines", "name": "ideal", "x": counts, "y": ideal}
        | {"line": {"color": "ink", "dash": "dash", "width": 1}},
        {"type": "scatter", "mode": "lines+markers", "name": "measured", "x": counts, "y": found}
        | {"line": {"color": "c0"}, "marker": {"color": "c0", "size": 9}, "error_y": spread},
    ]
    guessed = [step for step in steps if step.predicted_s]
    if guessed:
        traces.append(
            {"type": "scatter", "mode": "lines+markers", "name": "predicted"}
            | {"x": [step.workers for step in guessed]}
            | {"y": [value(step, step.predicted_s or 0.0) for step in guessed]}
            | {"line": {"color": "c1", "dash": "dot"}}
            | {"marker": {"color": "c1", "size": 9, "symbol": "diamond-open"}}
        )
    label = "efficiency, %" if is_share else "speedup"
    is_log = is_wide(counts) and not is_share
    layout = {
        "xaxis": counts_axis("workers", counts, is_wide(counts)),
        "yaxis": counts_axis(label, ideal, True) if is_log else make_axis(label, rangemode="tozero"),
    }
    says = f"{name} by number of workers, measured and ideal{' and predicted' if guessed else ''}."
    return PlotSpec(f"{name} by workers: {what}", says, traces, layout)
