"""All metrics of a run: those that it names in `evaluate.metrics`, by its targets, and a script's.

Shapes: N samples, C classes, T labels or numbers of a sample. Outputs are logits or numbers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data import Store
from lockstep.errors import ModelError, SpecError, unknown
from lockstep.models.source_hash import describe_callable, describe_values
from lockstep.spec import Run
from lockstep.spec.rule.loss_rule import LOSSES
from lockstep.train.evaluation.metric import Metric, Metrics, check_metrics

_Pair = tuple[Tensor, Tensor]
_TOP = 5


def named_metrics(run: Run) -> Metrics:
    """The functions that a Run names."""
    kind = LOSSES[run.train.loss]
    every = {"classes": _OF_CLASSES, "labels": _OF_LABELS, "numbers": _OF_NUMBERS}[kind]
    return {name: every[name] for name in run.evaluate.metrics}


def find_metrics(
    run: Run, own: Metrics, model: nn.Module, store: Store, counts: bool, source: dict[str, Any]
) -> Metrics:
    """The metrics that a Run names and those of a script, tried out; refuses a judge that is none of them.

    Fills in the `source` of a script's functions that decide something. `counts`: there is an accuracy.
    """
    check_metrics(own, model, store)
    named, (judge, _) = named_metrics(run), run.evaluate.judge(counts)
    if twice := named.keys() & own.keys():
        raise ModelError(f"metrics: {min(twice)!r} is in evaluate.metrics, too: give yours another name")
    check_metrics(named, model, store)
    known = ["loss", *(["accuracy"] if counts else []), *named, *own]
    if judge not in known:
        raise SpecError(
            f"evaluate.best={run.evaluate.best}: {unknown('metric', judge, known)}; name it in "
            "evaluate.metrics, or give a function of yours as metrics="
        )
    deciding = own if run.evaluate.patience else own.keys() & {judge}
    if deciding:
        source["metrics"] = {n: f"{describe_callable(own[n])} {describe_values(own[n])}" for n in deciding}
    return {**named, **own}


def _top5(outputs: Tensor, targets: Tensor) -> Tensor:
    best = outputs.topk(min(_TOP, outputs.shape[1]), 1).indices
    return (best == targets[:, None]).any(1).double().mean()


def _class_counts(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each class: samples that are right, that are of it, that are taken for it."""
    size, found = outputs.shape[1], outputs.argmax(1)
    right = found[found == targets]
    return tuple(torch.bincount(each.cpu(), minlength=size) for each in (right, targets, found))  # type: ignore[return-value]


def _balanced_accuracy(outputs: Tensor, targets: Tensor) -> _Pair:
    right, there, _ = _class_counts(outputs, targets)
    return right, there


def _f1_of_classes(outputs: Tensor, targets: Tensor) -> _Pair:
    right, there, taken = _class_counts(outputs, targets)
    return 2 * right, there + taken


def _f1_of_labels(outputs: Tensor, targets: Tensor, dims: tuple[int, ...]) -> _Pair:
    """A label is said to be there from a probability of one half on."""
    said, there = outputs >= 0, targets.view_as(outputs) >= 0.5
    return 2 * (said & there).sum(dims), said.sum(dims) + there.sum(dims)


def _exact_match(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs >= 0) == (targets.view_as(outputs) >= 0.5)).all(1).double().mean()


def _mean_ap(outputs: Tensor, targets: Tensor) -> float:
    """The mean over labels of the average precision: of each sample that has it, the precision down to it.

    Samples of equal score are taken together, so that their order does not matter. A label that no sample
    has does not count.
    """
    there = targets.view_as(outputs) >= 0.5
    found = [_average_precision(outputs[:, i], there[:, i]) for i in range(outputs.shape[1])]
    known = [each for each in found if each is not None]
    return sum(known) / len(known) if known else float("nan")


def _average_precision(scores: Tensor, there: Tensor) -> float | None:
    if not there.any():
        return None
    scores, places = scores.sort(descending=True, stable=True)
    right = there[places].cumsum(0)
    last = torch.cat([scores[1:] != scores[:-1], torch.ones(1, dtype=torch.bool)])  # of those of equal score
    hits, ranks = right[last].double(), torch.nonzero(last).flatten().double() + 1
    gained = torch.diff(hits, prepend=torch.zeros(1, dtype=torch.float64))
    return float((gained * hits / ranks).sum() / hits[-1])


def _mae(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.double() - targets.view_as(outputs)).abs().mean()


def _rmse(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.double() - targets.view_as(outputs)).square().mean().sqrt()


def _r2(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over targets of 1 - squared error / variance; one that never varies counts 0."""
    wanted = targets.view_as(outputs).double()
    varies = (wanted - wanted.mean(0)).square().sum(0)
    share = 1 - (outputs.double() - wanted).square().sum(0) / varies
    return share.where(varies > 0, 0.0).mean()


def _of_whole_split(function: Metric) -> Metric:
    function.whole_split = True  # type: ignore[attr-defined]
    return function


_OF_CLASSES: dict[str, Metric] = {
    "top5": _top5,
    "balanced_accuracy": _balanced_accuracy,
    "macro_f1": _f1_of_classes,
}
_OF_LABELS: dict[str, Metric] = {
    "macro_f1": partial(_f1_of_labels, dims=(0,)),
    "micro_f1": partial(_f1_of_labels, dims=(0, 1)),
    "exact_match": _exact_match,
    "mean_ap": _of_whole_split(_mean_ap),
}
_OF_NUMBERS: dict[str, Metric] = {"mae": _mae, "rmse": _of_whole_split(_rmse), "r2": _of_whole_split(_r2)}
