"""ShownRun: what the page shows of a finished run, read from its directory and checked as it is read."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lockstep.spec.identity import flatten

Row = dict[str, Any]
_STAGE = ("stage", "busy_s", "waited_s", "bubble", "sent_mb", "lanes_in_flight", "peak_mb")
_KINDS = {
    **dict.fromkeys(("weights_sha256", "identity", "plan", "split", "device", "best_by"), str),
    **dict.fromkeys(("generations", "stages"), list),
    "layers": dict,
}
_ABOVE_0 = ("img_s", "workers")
_LAYER = ("busy_s", "exchange_s", "channel_mb", "spatial_mb")


class Damaged(Exception):
    """A run or a file that cannot be shown, in one line."""


@dataclass(frozen=True)
class ShownRun:
    """A finished run; `settings` and `identity` are flat tables, `steps` and `epochs` rows of its metrics."""

    name: str
    path: Path
    settings: Row
    identity: Row
    summary: Row
    steps: list[Row]
    epochs: list[Row]

    @property
    def workers(self) -> int:
        return int(self.summary["workers"])

    @property
    def plan(self) -> str:
        """As it was given; empty for workers that each have the whole model."""
        return str(self.summary.get("plan") or "")

    @property
    def split(self) -> str:
        """The images that every epoch is evaluated on: test, or val."""
        return str(self.summary.get("split") or "test")

    @property
    def keeps_workers(self) -> bool:
        """Whether as many workers as at its end have trained all of it."""
        return {row["workers"] for row in self.generations} <= {self.workers}

    @property
    def generations(self) -> list[Row]:
        """The memberships of workers that trained it."""
        return list(self.summary.get("generations") or ())

    @property
    def stages(self) -> list[Row]:
        """What each worker of a pipeline measured."""
        return list(self.summary.get("stages") or ())

    @property
    def layers(self) -> Row | None:
        """What workers that share layers measured; None if there is no row."""
        found: Row = self.summary.get("layers") or {}
        return found if found.get("rows") else None

    @property
    def train_s(self) -> float | None:
        """Seconds of all steps, without evaluation; None if a step has no time."""
        if not self.steps or any("positions" not in row for row in self.steps):
            return None
        seconds = ((row["positions"][1] - row["positions"][0]) / row["img_s"] for row in self.steps)
        return float(sum(seconds))

    def setting(self, key: str) -> Any:
        """A key of run.toml; what the identity has for one that was chosen at the start, such as kernels."""
        return self.identity.get(key, self.settings.get(key))


def read_run(path: Path) -> ShownRun:
    """Read a run's directory; Damaged says what is wrong with it."""
    if not (path / "summary.json").is_file():
        raise Damaged(f"{path}: not finished: it has no summary.json")
    try:
        settings = flatten("", tomllib.loads((path / "run.toml").read_text(encoding="utf-8")))
        identity, summary = _table(path / "identity.json"), _table(path / "summary.json")
        steps, epochs = _metrics(path / "metrics.jsonl")
        _check_summary(summary)
    except OSError as error:
        raise Damaged(f"{error.filename}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        what = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise Damaged(f"{path}: damaged: {what}") from None
    return ShownRun(path.resolve().name, path, settings, identity, summary, steps, epochs)


def _table(path: Path) -> Row:
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} is not a table")
    return found


def _metrics(path: Path) -> tuple[list[Row], list[Row]]:
    """The rows of steps and of epochs."""
    steps, epochs = [], []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["kind"] == "step":
            _numbers(row, ("step", "loss", "img_s"), ("accuracy",))
            first, last = row.get("positions", (0, 0))
            _numbers({"positions": last - first}, ("positions",))
            steps.append(row)
        elif row["kind"] == "epoch":
            split = row.get("split", "test")
            _numbers(row, ("step", f"{split}_loss"), (key for key in row if key.startswith(f"{split}_")))
            epochs.append(row)
    return steps, epochs


def _check_summary(summary: Row) -> None:
    """Everything that the page takes from it is there and of its type."""
    known = ("best_accuracy", "best_value", "test_accuracy", "data_wait_share", "data_wait_step_s")
    _numbers(summary, ("loss", "img_s", "workers", "steps", "epochs"), ("accuracy", *known))
    for key, kind in _KINDS.items():
        if summary.get(key) is not None and not isinstance(summary[key], kind):
            raise ValueError(f"{key} of summary.json is no {kind.__name__}")
    summary["weights_sha256"][:1]
    for row in summary.get("generations") or ():
        _numbers(row, ("step", "workers", "generation", "since", "seconds"))
        "; ".join(row["changes"])
        datetime.fromtimestamp(row["since"], UTC)
    for stage in summary.get("stages") or ():
        _numbers(stage, _STAGE)
        for kind, lane, start, end in stage["timeline"]:
            _numbers({"lane": lane, "time": end - start, str(kind): 0}, ("lane", "time"))
    _check_layers(summary.get("layers"))


def _check_layers(layers: Row | None) -> None:
    if not layers:
        return
    _numbers(layers, ("busy_s", "exchange_s", "share"))
    for row in layers["rows"]:
        _numbers(row, _LAYER)
        str(row["layer"])
    for worker in layers.get("timeline", ()):
        for place, what, start, length in worker:
            layers["rows"][place], str(what), start + length


def _numbers(row: Row, needed: Iterable[str], known: Iterable[str] = ()) -> None:
    for key in (*needed, *(key for key in known if row.get(key) is not None)):
        value = row[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{key}={value!r} is not a number")
        if not (math.isfinite(value) or key.endswith("loss")) or (key in _ABOVE_0 and value <= 0):
            raise ValueError(f"{key}={value} cannot be")
