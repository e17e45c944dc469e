"""`[evaluate]`: what is measured after every epoch, by what the best one is chosen, when a run ends early."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.errors import SpecError, unknown
from lockstep.spec.field import check_fields, require
from lockstep.spec.rule.loss_rule import LOSSES, METRICS

_ORDERS = {"min": -1.0, "max": 1.0}


@dataclass(frozen=True)
class Evaluate:
    """Metrics beside loss and accuracy; what chooses the best epoch; how many worse ones end the run."""

    metrics: tuple[str, ...] = ()
    best: str = "auto"  # accuracy, else loss; or a metric, with min: or max: before its name
    patience: int = 0  # epochs in a row that are no better than the best; 0: train to the end

    def __post_init__(self) -> None:
        check_fields(self, "evaluate")
        for name in self.metrics:
            if name not in METRICS:
                raise SpecError(f"evaluate.metrics: {unknown('metric', name, METRICS)}")
        require(self.patience >= 0, "evaluate.patience", self.patience, "must be 0 (off) or more")
        order, colon, name = self.best.rpartition(":")
        good = bool(name) and (not colon or order in _ORDERS)
        require(good, "evaluate.best", self.best, "must be auto or a name, or min:NAME or max:NAME")

    def check_kind(self, loss: str) -> None:
        """Refuse metrics that are not for the targets of a loss."""
        kind = LOSSES[loss]
        for name in self.metrics:
            if kind not in METRICS[name][0]:
                fits = ", ".join(each for each, (kinds, _) in METRICS.items() if kind in kinds)
                raise SpecError(
                    f"evaluate.metrics={name} is for targets that are {' or '.join(METRICS[name][0])}, and "
                    f"with train.loss={loss} they are {kind}: use some of {fits}"
                )

    def judge(self, counts: bool) -> tuple[str, float]:
        """The name of what chooses the best epoch; and 1 if more of it is better, else -1.

        `counts`: samples are counted correct, so that there is an accuracy.
        """
        if self.best == "auto":
            return ("accuracy", 1.0) if counts else ("loss", -1.0)
        order, _, name = self.best.rpartition(":")
        less = name == "loss" or (name in METRICS and METRICS[name][1])
        return name, _ORDERS[order] if order else -1.0 if less else 1.0

    def score(self, loss: float, accuracy: float | None, metrics: Mapping[str, float]) -> float | None:
        """How good an epoch is, more being better; None if what judges it was not finite."""
        name, sign = self.judge(accuracy is not None)
        value = {"loss": loss, "accuracy": accuracy, **metrics}.get(name)
        return sign * value if value is not None and math.isfinite(value) else None

    def tell_stop(self, done: int, epochs: int) -> dict[str, dict[str, int]]:
        """For a summary, if the run ended before its last epoch."""
        early = {"after_epochs": done, "of": epochs, "patience": self.patience}
        return {"stopped_early": early} if done < epochs else {}

    def tell_best(self, score: float | None, counts: bool) -> dict[str, float | str | None]:
        """What judged the best epoch, and its value, for a summary."""
        name, sign = self.judge(counts)
        value = None if score is None else sign * score
        return {"best_by": name, "best_value": value} | (
            {"best_accuracy": value} if name == "accuracy" else {}
        )
