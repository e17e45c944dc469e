"""What `lockstep scale` found with a number of workers, as a table and as records."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from typing import Any

from lockstep import __version__
from lockstep.spec import Run
from lockstep.spec.record import Record


@dataclass(frozen=True)
class ScaleRow:
    """What was measured with a number of workers."""

    workers: int
    batch: int
    lanes: int
    step_s: float  # median
    spread_s: tuple[float, float]  # fastest and slowest step
    n: int
    weights_sha256: str
    predicted_s: float | None = None

    @property
    def img_s(self) -> float:
        return self.batch / self.step_s


def print_scale(rows: list[ScaleRow], run: Run) -> None:
    """A row for every number of workers."""
    first = rows[0]
    table: list[tuple[str, ...]] = [("workers", "batch", "step", "spread", "images", "speedup", "efficiency")]
    table = [(*table[0], "predicted", "error")] if first.predicted_s else table
    for row in rows:
        speedup = row.img_s / first.img_s
        table.append(
            (
                str(row.workers),
                str(row.batch),
                f"{1e3 * row.step_s:,.1f} ms",
                f"{row.spread_s[0] / row.step_s:.2f} to {row.spread_s[1] / row.step_s:.2f}",
                f"{row.img_s:,.0f} img/s",
                f"{speedup:.2f}",
                f"{100 * speedup * first.workers / row.workers:.0f} %",
                *_tell_prediction(row),
            )
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
    print(f"{run.model.name}, {run.train.precision}; medians of {first.n} steps")


def _tell_prediction(row: ScaleRow) -> list[str]:
    if row.predicted_s is None:
        return []
    return [f"{1e3 * row.predicted_s:,.1f} ms", f"{100 * (row.predicted_s / row.step_s - 1):+.0f} %"]


def scale_records(rows: list[ScaleRow], run: Run, options: argparse.Namespace) -> list[Record]:
    """A record of each number of workers: the seconds of a step."""
    import torch

    from lockstep.measure.probe_device import name_device

    on_gpu = options.device != "cpu" and torch.cuda.is_available()
    hardware = name_device(torch.device("cuda" if on_gpu else "cpu"))
    kind = "weak" if options.weak else "strong"
    versions = {"lockstep": __version__, "torch": torch.__version__}
    commit = os.environ.get("LOCKSTEP_COMMIT", "unknown")
    command = " ".join(["lockstep", *sys.argv[1:]])
    records = []
    for row in rows:
        name = f"step of {run.model.name}, {kind} scaling, workers: {row.workers}"
        details: dict[str, Any] = {
            "scaling": kind,
            "model": run.model.name,
            "workers": row.workers,
            "batch": row.batch,
            "lanes": row.lanes,
            "img_s": row.img_s,
        }
        details |= {"speedup": row.img_s / rows[0].img_s, "weights_sha256": row.weights_sha256}
        details |= {"predicted_s": row.predicted_s} if row.predicted_s else {}
        facts = (hardware, command, commit, versions, details)
        records.append(Record(name, row.step_s, "s", row.n, row.spread_s, *facts))
    return records


def tell_difference(rows: list[ScaleRow]) -> str:
    """That the bits are not the same, and what to do."""
    found = ", ".join(f"{row.workers}: {row.weights_sha256[:12]}" for row in rows)
    return f"weights DIFFER by the number of workers ({found}): train with --trace, then `lockstep verify`"
