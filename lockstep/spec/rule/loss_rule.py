"""`train.loss` and what hangs on it: what a target is, which metrics there are, weights of classes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lockstep.errors import SpecError
from lockstep.spec.field import require, require_choice

# Each loss by what its targets are: class numbers; labels, each there or not; or numbers.
LOSSES = {
    "cross_entropy": "classes",
    "squared_error": "classes",
    "binary_cross_entropy": "labels",
    "mse": "numbers",
    "l1": "numbers",
    "huber": "numbers",
}
_WEIGHTED = "cross_entropy"
OF_ONE_LOSS = ("label_smoothing", "class_weights")  # keys of [train] that only this one has

# Each metric by the kinds of targets it is for, and whether less of it is better.
METRICS: dict[str, tuple[tuple[str, ...], bool]] = {
    "top5": (("classes",), False),
    "balanced_accuracy": (("classes",), False),
    "macro_f1": (("classes", "labels"), False),
    "micro_f1": (("labels",), False),
    "exact_match": (("labels",), False),
    "mean_ap": (("labels",), False),
    "mae": (("numbers",), True),
    "rmse": (("numbers",), True),
    "r2": (("numbers",), False),
}


def check_loss(loss: str, smoothing: float, class_weights: str) -> None:
    """Refuse a loss that there is not, and keys that it does not have."""
    require_choice("train.loss", loss, tuple(LOSSES))
    fits = loss == _WEIGHTED
    rule = f"works with loss={_WEIGHTED} only; train.loss is {loss}"
    require(fits or not smoothing, "train.label_smoothing", smoothing, f"{rule}: set label_smoothing=0")
    weighs = class_weights != "none"
    require(fits or not weighs, "train.class_weights", class_weights, f"{rule}: set class_weights=none")
    read_weights(class_weights)


def write_weights(given: object) -> object:
    """Weights of classes as one text, where a file or a script has a list of numbers."""
    numbers = isinstance(given, Sequence) and not isinstance(given, str)
    if numbers and all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in given):  # type: ignore[attr-defined]
        return ",".join(f"{float(each)!r}" for each in given)  # type: ignore[attr-defined]
    return given


def read_weights(text: str) -> tuple[float, ...] | None:
    """The numbers of `train.class_weights`; None for `none` and `balanced`, which have none."""
    if text in ("none", "balanced"):
        return None
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(math.isfinite(each) and each >= 0 for each in found) or not any(found):
        raise SpecError(
            f"train.class_weights={text} must be none, balanced, or a number for each class, as 1,2.5,1: "
            "0 or more, and not all 0"
        )
    return found
