"""Draws layers.png: what each layer over several workers takes in a step, and when, in the last one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_COMPUTE, _EXCHANGE = "#4477aa", "#cc6677"
_COLORS = {"busy": _COMPUTE, "spatial": _EXCHANGE, "channel": "#ddaa33"}
_STRIP = 0.3  # inches for each worker's time
_MOST = 60  # bars; the rest is one bar
_LEAST = 0.004  # of the longest bar: less can hardly be seen
_ROW = 0.16  # inches
_LONGEST = 30  # letters of a layer's name


def draw_layers(directory: Path) -> Path | None:
    """Draw layers.png into the directory of a finished run; None if its layers were not split."""
    path = directory / "summary.json"
    layers = json.loads(path.read_text(encoding="utf-8")).get("layers") if path.is_file() else None
    if not layers or not layers["rows"]:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = _fewer(layers["rows"])
    times = layers.get("timeline", [])  # of fused and compiled kernels there is none
    high, strips = 1.2 + _ROW * len(rows), 0.8 + _STRIP * len(times)
    figure = Figure(figsize=(10, 0.6 + high + bool(times) * strips), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    above, axes = figure.subplots(2, height_ratios=[strips, high]) if times else [figure.subplots()] * 2
    if times:
        _draw_times(above, times)
    places, busy = range(len(rows)), [1e3 * row["busy_s"] for row in rows]
    spent = [1e3 * row["exchange_s"] for row in rows]
    axes.barh(places, busy, 0.75, color=_COMPUTE, label="computing, forward and backward")
    axes.barh(places, spent, 0.75, busy, color=_EXCHANGE, label="exchanging, with the waiting for others")
    axes.set_yticks(places, [_short(row["layer"]) for row in rows], fontsize=7)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    right = axes.secondary_yaxis("right")
    right.set_yticks(places, list(map(_about, rows)), fontsize=6, color="#555555")
    right.tick_params(length=0)
    launches = ": of launches" if layers["timed"] == "launches" else ""
    axes.set_xlabel(
        f"milliseconds a step{launches}, each the largest over workers; right: what is sent, and the rule"
    )
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    right.spines["right"].set_visible(False)
    if times:
        label = "exchanging channels, in the upper part"
        above.plot([], [], color=_COLORS["channel"], linewidth=6, label=label)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.suptitle(
        f"{directory.name}: {100 * layers['share']:.0f} % of the multiplications are cut", x=0.02, ha="left"
    )
    path, new = directory / "layers.png", directory / ".layers.png"
    figure.savefig(new)
    return new.replace(path)  # atomic, as this process may be killed while it draws


def _draw_times(axes: Any, workers: list[list[list[Any]]]) -> None:
    """A strip for each worker: exchanges lie over the computing that they interrupt."""
    for number, events in enumerate(workers):
        for what, color in _COLORS.items():
            spans = [(start / 1e3, length / 1e3) for _, kind, start, length in events if kind == what]
            axes.broken_barh(spans, (number - 0.4, 0.8), color=color, linewidth=0)
    ends = [start + length for events in workers for _, _, start, length in events]
    axes.set_xlim(0, max(ends, default=1) / 1e3)
    axes.set_yticks(range(len(workers)), [f"worker {number}" for number in range(len(workers))], fontsize=7)
    axes.set_ylim(len(workers) - 0.5, -0.5)
    axes.set_xlabel("milliseconds of the last step, its first lanes", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _fewer(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that take longest, in their order, and one for the rest."""
    times = [row["busy_s"] + row["exchange_s"] for row in rows]
    order = sorted(range(len(rows)), key=lambda i: -times[i])
    shown = sorted(i for i in order[:_MOST] if times[i] >= _LEAST * max(times))
    rest = [row for i, row in enumerate(rows) if i not in shown]
    if not rest:
        return rows
    keys = "busy_s", "exchange_s", "spatial_mb", "channel_mb"
    other = {"layer": f"{len(rest)} others", **{key: sum(row[key] for row in rest) for key in keys}}
    return [*(rows[i] for i in shown), other]


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST else f"…{name[1 - _LONGEST :]}"


def _about(row: dict[str, Any]) -> str:
    """The megabytes, and the rule."""
    kb = 1e3 * (row["spatial_mb"] + row["channel_mb"])
    sent = "" if not kb else f"{kb / 1e3:.2f} MB" if kb >= 100 else f"{kb:.1f} kB"
    return "  ".join(part for part in (sent, row.get("rule", "")) if part)
