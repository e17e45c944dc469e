"""Draws layers.png: how long each layer over several workers computed and exchanged, in a step of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_COMPUTE, _EXCHANGE = "#4477aa", "#cc6677"
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
    figure = Figure(figsize=(10, 1.5 + _ROW * len(rows)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
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
    figure.legend(loc="outside upper right", ncols=2, frameon=False, fontsize=8)
    figure.suptitle(
        f"{directory.name}: {100 * layers['share']:.0f} % of the multiplications are cut", x=0.02, ha="left"
    )
    path, new = directory / "layers.png", directory / ".layers.png"
    figure.savefig(new)
    return new.replace(path)  # atomic, as this process may be killed while it draws


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
