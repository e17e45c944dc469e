"""What a run of a sweep has reached so far, read from its directory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from lockstep.cli.search.swept_run import SweptRun


@dataclass(frozen=True)
class Evaluation:
    """At an epoch's end, on the images by which runs are compared."""

    epochs: int  # trained so far
    step: int
    seconds: float  # of all steps so far
    loss: float
    accuracy: float


@dataclass(frozen=True)
class Outcome:
    """A run's results; those of the end are there when it is finished."""

    swept: SweptRun
    evaluations: tuple[Evaluation, ...] = ()
    split: str = "test"  # the images of the evaluations
    seconds: float = 0.0
    img_s: float = 0.0
    weights_sha256: str = ""  # of the end, or of the newest checkpoint
    test_accuracy: float | None = None  # at the end, if the evaluations are of validation images
    failure: str = ""  # its last words in this sweep
    is_finished: bool = False

    @property
    def epochs(self) -> int:
        return self.evaluations[-1].epochs if self.evaluations else 0

    @property
    def share(self) -> float:
        """Of its epochs that are done; all, if it ended early by itself."""
        return 1.0 if self.is_finished else self.epochs / self.swept.run.train.epochs

    @property
    def accuracy(self) -> float | None:
        return self.evaluations[-1].accuracy if self.evaluations else None

    @property
    def best(self) -> float | None:
        return max((each.accuracy for each in self.evaluations), default=None)

    def after(self, epochs: int | None) -> Evaluation | None:
        """When it had trained so many epochs, or the last; None if it has not, or failed before."""
        return next((e for e in reversed(self.evaluations) if epochs is None or e.epochs == epochs), None)


def read_outcome(swept: SweptRun, failure: str = "") -> Outcome:
    """Read metrics.jsonl, and summary.json if the run is finished."""
    train, seconds, images, found = swept.run.train, 0.0, 0, list[Evaluation]()
    split = "test"
    for row in _rows(swept.path / "metrics.jsonl"):
        if row["kind"] == "step":
            taken = train.batch_of(row["epoch"]) * row.get("steps", 1)  # of a round
            seconds, images = seconds + taken / row["img_s"], images + taken
        elif row["kind"] == "epoch":
            split = row["split"]
            loss, accuracy = row[f"{split}_loss"], row.get(f"{split}_accuracy", math.nan)
            found.append(Evaluation(row["epoch"] + 1, row["step"], seconds, loss, accuracy))
    summary = _table(swept.path / "summary.json")
    return Outcome(
        swept,
        tuple(found),
        split,
        seconds,
        images / seconds if seconds else 0.0,
        summary.get("weights_sha256") or _newest_hash(swept.path / "checkpoints"),
        summary.get("test_accuracy"),
        failure,
        bool(summary),
    )


def mean_accuracy(found: Iterable[Outcome], epochs: int | None = None) -> float | None:
    """The mean over the seeds of a combination, at the end or after some epochs; None if one has none."""
    return _mean(found, epochs, "accuracy")


def mean_loss(found: Iterable[Outcome], epochs: int | None = None) -> float:
    """The same of the loss, which decides between equal accuracies; infinite if one has none."""
    value = _mean(found, epochs, "loss")
    return math.inf if value is None or math.isnan(value) else value


def _mean(found: Iterable[Outcome], epochs: int | None, what: str) -> float | None:
    rows = [each.after(epochs) for each in found]
    return fmean(getattr(row, what) for row in rows) if rows and None not in rows else None


def _newest_hash(folder: Path) -> str:
    manifests = sorted(folder.glob("step-*.json")) if folder.is_dir() else []
    return str(_table(manifests[-1]).get("weights_sha256", "")) if manifests else ""


def _table(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _rows(path: Path) -> list[dict[str, Any]]:
    """The whole rows; the last one may be cut if the run was killed."""
    found = list[dict[str, Any]]()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return found
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found
