"""Metrics of a split: by name against a definition by hand, of one's own, and alike for any workers."""

from copy import deepcopy

import pytest
import torch
from small import small_run
from torch import nn
from world import in_threads

from lockstep.data.augment import Augment
from lockstep.data.store import MemorySplit
from lockstep.errors import ModelError
from lockstep.kernels.loss import make_loss
from lockstep.spec import Evaluate, Run, Train
from lockstep.spec.rule.loss_rule import LOSSES, METRICS
from lockstep.train.evaluation.host_evaluate import Evaluator
from lockstep.train.evaluation.named_metric import named_metrics

CPU, SAMPLES, OUTPUTS, BLOCK = torch.device("cpu"), 37, 6, 4


def drawn(kind):
    """Images, and targets of a kind for them; label 4 is nowhere, and class 5."""
    generator = torch.Generator().manual_seed(5)
    images = torch.randint(0, 256, (SAMPLES, 1, 4, 4), dtype=torch.uint8, generator=generator)
    classes = torch.randint(0, OUTPUTS - 1, (SAMPLES,), generator=generator)
    labels = (torch.rand(SAMPLES, OUTPUTS, generator=generator) > 0.6).float()
    labels[:, 4] = 0.0
    numbers = torch.randn(SAMPLES, OUTPUTS, generator=generator)
    return MemorySplit(images, {"classes": classes, "labels": labels, "numbers": numbers}[kind])


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, OUTPUTS)).eval()


def evaluator(loss, group, metrics, names=()):
    run = Run(train=Train(batch=BLOCK, lanes=1, loss=loss), evaluate=Evaluate(metrics=names))
    every = {**named_metrics(run), **metrics}
    augment = Augment.parse([], 0, 4, (0.5,), (0.25,))
    return Evaluator(run, drawn(LOSSES[loss]), augment, make_loss(run.train), CPU, group, every)


def names_of(kind):
    return tuple(name for name, (kinds, _) in METRICS.items() if kind in kinds)


def whole(outputs, targets):
    """Hangs on the order of all samples."""
    places = torch.arange(1, len(outputs) + 1, dtype=torch.float64)
    return float((outputs.double().sum(1) * places).sum() + targets.double().flatten()[-1])


whole.whole_split = True


@pytest.mark.gloo
@pytest.mark.parametrize("loss", ["cross_entropy", "binary_cross_entropy", "mse"])
def test_they_are_the_same_at_any_number_of_workers(loss):
    names, found, model = names_of(LOSSES[loss]), [], network()
    for workers in (1, 2, 3, 11):  # of the last, one has no block
        found += in_threads(workers, lambda g: evaluator(loss, g, {"whole": whole}, names)(deepcopy(model)))
    assert set(found[0].metrics) == {*names, "whole"}
    assert all(each == found[0] and each.metrics == found[0].metrics for each in found)
    split = drawn(LOSSES[loss])
    with torch.no_grad():
        blocks = torch.split(Augment.parse([], 0, 4, (0.5,), (0.25,)).normalize(split.images), BLOCK)
        padded = [torch.cat([b, b[-1:].expand(BLOCK - len(b), -1, -1, -1)]) for b in blocks]
        outputs = torch.cat([model(b) for b in padded])[:SAMPLES]
    assert found[0].metrics["whole"] == whole(outputs, split.labels)
    for name, value in by_hand(loss, outputs, split.labels).items():
        assert found[0].metrics[name] == pytest.approx(value, abs=1e-6), name


def f1(said, there):
    both = sum(a and b for a, b in zip(said, there, strict=True))
    return 2 * both / (sum(said) + sum(there)) if sum(said) + sum(there) else None


def mean(values):
    known = [value for value in values if value is not None]
    return sum(known) / len(known)


def average_precision(scores, there):
    """By its definition: the precision at each threshold, times the recall that it adds."""
    total, before, area = sum(there), 0.0, 0.0
    if not total:
        return None
    for threshold in sorted(set(scores), reverse=True):
        taken = [t for s, t in zip(scores, there, strict=True) if s >= threshold]
        area += (sum(taken) / total - before) * sum(taken) / len(taken)
        before = sum(taken) / total
    return area


def by_hand(loss, outputs, targets):
    columns = range(OUTPUTS)
    if loss == "cross_entropy":
        said, there = outputs.argmax(1).tolist(), targets.tolist()
        hits = [t in o.topk(5).indices for o, t in zip(outputs, there, strict=True)]
        recall = [
            mean([s == c for s, t in zip(said, there, strict=True) if t == c]) if c in there else None
            for c in columns
        ]
        ones = [f1([s == c for s in said], [t == c for t in there]) for c in columns]
        return {"top5": mean(hits), "balanced_accuracy": mean(recall), "macro_f1": mean(ones)}
    if loss == "mse":
        gap, spread = outputs - targets, targets - targets.mean(0)
        r2 = [1 - float(gap[:, c].square().sum() / spread[:, c].square().sum()) for c in columns]
        return {"mae": float(gap.abs().mean()), "rmse": float(gap.square().mean()) ** 0.5, "r2": mean(r2)}
    said, there = outputs >= 0, targets > 0.5
    return {
        "macro_f1": mean([f1(said[:, c].tolist(), there[:, c].tolist()) for c in columns]),
        "micro_f1": f1(said.flatten().tolist(), there.flatten().tolist()),
        "exact_match": mean([bool((a == b).all()) for a, b in zip(said, there, strict=True)]),
        "mean_ap": mean([average_precision(outputs[:, c].tolist(), there[:, c].tolist()) for c in columns]),
    }


def test_equal_scores_are_taken_together():
    outputs = torch.tensor([[1.0], [0.0], [0.0], [0.0]])
    found = [
        named_metrics(Run(train=Train(loss="binary_cross_entropy"), evaluate=Evaluate(metrics=("mean_ap",))))[
            "mean_ap"
        ](outputs, torch.tensor(there).float()[:, None])
        for there in ([0, 1, 0, 0], [0, 0, 0, 1])
    ]
    assert found[0] == found[1] == 0.25


@pytest.mark.gloo
def test_a_failure_over_the_whole_split_is_everyones():
    def bad(outputs, targets):
        raise ValueError("needs two classes")

    bad.whole_split = True

    def work(group):
        with pytest.raises(ModelError, match="metrics: bad: needs two classes"):
            evaluator("cross_entropy", group, {"bad": bad})(network())
        return True

    assert in_threads(2, work) == [True, True]


def test_keys_that_do_not_fit_are_one_line(tmp_path):
    from lockstep.errors import SpecError

    cases = {
        "evaluate.metrics=macro_f2": "did you mean 'macro_f1'",
        "evaluate.metrics=mae": "evaluate.metrics=mae is for targets that are numbers, and with train.loss=",
        "evaluate.patience=-1": "evaluate.patience=-1 must be 0",
        "evaluate.best=most:loss": "must be auto or a name",
        "train.class_weights=some": "must be none, balanced, or a number for each class",
        "train.class_weights=0,0": "not all 0",
        "data.repeats=2": "not with data.order=balanced",
    }
    for key, message in cases.items():
        with pytest.raises(SpecError, match=message.replace("(", r"\(")):
            small_run("data.order=balanced", key)


def test_what_judges_an_epoch():
    assert Evaluate().judge(True) == ("accuracy", 1) and Evaluate().judge(False) == ("loss", -1)
    assert Evaluate(best="mae").judge(False) == ("mae", -1) and Evaluate(best="iou").judge(True) == ("iou", 1)
    assert Evaluate(best="min:iou").judge(True) == ("iou", -1)
    scores = [Evaluate(best="loss").score(loss, None, {}) for loss in (0.5, float("nan"))]
    assert scores == [-0.5, None] and Evaluate(best="iou").score(0.5, 0.5, {}) is None
