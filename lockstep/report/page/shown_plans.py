"""What `lockstep plan --json` printed, as the page shows it: steps predicted by workers, for given links."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.report.page.shown_run import Damaged, Row

_EXPOSED = ("exposed_s", "inside_s", "gather_s")
_REST = ("codec_s", "bubble_s", "update_s", "host_s", "data_s")


@dataclass(frozen=True)
class PlannedStep:
    """A plan's step in seconds; computing, what is exposed and the rest add up to the total."""

    plan: str
    workers: int
    compute_s: float
    exposed_s: float  # all exchanges while nothing is computed
    hidden_s: float  # exchanges beside computing
    rest_s: float  # codecs, bubble, update, host, waiting for images
    total_s: float
    range_s: tuple[float, float]
    img_s: float
    speedup: float
    efficiency: float
    memory_gb: float
    fits: bool

    @property
    def balance(self) -> float:
        """How many times as long as computing the exposed exchange is."""
        return self.exposed_s / self.compute_s if self.compute_s else 0.0


@dataclass(frozen=True)
class ShownPlans:
    """A file of plans; `what` and `links` are words about its run and its cluster."""

    path: Path
    cluster: str
    what: str
    links: str
    best: str
    steps: list[PlannedStep]  # as ranked
    why: list[str]

    @property
    def name(self) -> str:
        return f"{self.what} on {self.cluster}"

    @property
    def by_workers(self) -> list[PlannedStep]:
        """The first plan for each number of workers."""
        found: dict[int, PlannedStep] = {}
        for step in self.steps:
            found.setdefault(step.workers, step)
        return [found[workers] for workers in sorted(found)]


def are_plans(found: Any) -> bool:
    """Whether a file's JSON is of `lockstep plan --json`."""
    return isinstance(found, dict) and {"cluster", "plans"} <= found.keys()


def read_shown_plans(path: Path, found: Row) -> ShownPlans:
    """The plans; Damaged says what is wrong with them."""
    try:
        steps = [_read_step(row) for row in found["plans"]]
        if not steps:
            raise ValueError("there is no plan in it")
        best = found.get("best") or {}
        told = f"{_plan(best)}, {_workers(best['workers'])}" if best else ""
        why = [str(line) for line in found.get("why", ())]
        return ShownPlans(path, str(found["cluster"]), _what(path, found), _links(found), told, steps, why)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        what = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise Damaged(f"{path}: damaged plans: {what}") from None


def _read_step(row: Row) -> PlannedStep:
    low, high = (_number({"range_s": value}, "range_s") for value in row["range_s"])
    compute, total = _number(row, "compute_s"), _number(row, "total_s")
    workers = row["workers"]
    if type(workers) is not int or workers < 1 or not total:
        raise ValueError(f"workers={workers!r} with total_s={total} cannot be")
    return PlannedStep(
        plan=_plan(row),
        workers=workers,
        compute_s=compute,
        exposed_s=sum(_number(row, key) for key in _EXPOSED),
        hidden_s=_number(row, "hidden_s"),
        rest_s=sum(_number({"codec_s": 0.0, **row}, key) for key in _REST),  # older files have no codec_s
        total_s=total,
        range_s=(low, high),
        img_s=_number(row, "img_s"),
        speedup=_number(row, "speedup"),
        efficiency=_number(row, "efficiency"),
        memory_gb=_number(row, "memory_gb"),
        fits=bool(row["fits"]),
    )


def _number(row: Row, key: str) -> float:
    value = row[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key}={value!r} is not a number")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{key}={value} cannot be")
    return float(value)


def _plan(row: Row) -> str:
    """The plan, and which change of the run it is for."""
    return f"{row['plan']} {row.get('change') or ''}".rstrip()


def _what(path: Path, found: Row) -> str:
    if "model" not in found:
        return path.stem
    return f"{found['model']}, batch {int(found['batch']):,}, {found['precision']}"


def _links(found: Row) -> str:
    """How fast workers talk, in words; empty if the file does not say."""
    if "workers_a_node" not in found:
        return ""
    parts = [f"{_workers(found['workers_a_node'])} a node ({found['device']})"]
    for key, between in (("link", "between two of a node"), ("network", "from a node to others")):
        rate = found.get(key)
        if rate:
            speed, wait = _number(rate, "gb_s"), _number(rate, "latency_us")
            parts.append(f"{speed:g} GB/s and {wait:g} µs {between}")
    wire = f"; gradients travel in {found['wire']}" if "wire" in found else ""
    return ", ".join(parts) + wire


def _workers(count: Any) -> str:
    return f"{int(count):,} worker{'s' * (int(count) != 1)}"
