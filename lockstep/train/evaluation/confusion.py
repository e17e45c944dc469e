"""Which classes a trained run takes for which: counts by label and prediction, and the top-5 accuracy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.data import Split
from lockstep.errors import ModelError
from lockstep.kernels.structure import as_float, first
from lockstep.models.tensors import buffers_kept
from lockstep.runs.trained_run import Trained
from lockstep.train.evaluation.evaluate import find_loss, prepared, stock_evaluator

_TOP = 5


class Mistake(NamedTuple):
    """A sample by its number, its class and the one it was taken for, with the probability of each."""

    sample: int
    label: int
    predicted: int
    confidence: float
    of_label: float


@dataclass(frozen=True)
class Confusion:
    """`counts` [label, prediction] of samples, and how many had their label among the five most likely.

    `mistakes` are the samples whose class is not the most probable one, the surest first.
    """

    counts: Tensor
    in_top5: int
    mistakes: list[Mistake]

    @property
    def samples(self) -> int:
        return int(self.counts.sum())

    def rows(self, classes: tuple[str, ...]) -> list[dict[str, object]]:
        """Of each class: its samples, the share that is right, and what it is most often taken for."""
        found: list[dict[str, object]] = []
        for number, name in enumerate(classes):
            row = self.counts[number].clone()
            samples, right = int(row.sum()), int(row[number])
            row[number] = 0
            mistaken = classes[int(row.argmax())] if row.any() else None
            accuracy = right / samples if samples else None
            found.append({"class": name, "samples": samples, "accuracy": accuracy, "mistaken_for": mistaken})
        return found

    def pairs(self) -> list[tuple[int, int, int]]:
        """Label, prediction and how many samples, of all pairs that are confused, the most samples first."""
        wrong = self.counts.clone().fill_diagonal_(0)
        found = [
            (label, predicted, int(wrong[label, predicted])) for label, predicted in wrong.nonzero().tolist()
        ]
        return sorted(found, key=lambda pair: -pair[2])


@torch.no_grad()
def count_confusions(trained: Trained, split: Split) -> Confusion:
    """Classify every sample of a split, with stock kernels."""
    if not trained.is_classifier:
        raise ModelError(f"{trained.directory} is no classifier: it has no classes to count by")
    size, in_top5 = len(trained.classes), 0
    counts, mistakes, seen = torch.zeros(size * size, dtype=torch.int64), list[Mistake](), 0
    with prepared(trained), buffers_kept(trained.model):
        trained.model.eval()
        evaluator = stock_evaluator(trained, split, find_loss(trained, None), None)
        for images, labels, real in evaluator.seeded_blocks():
            logits = first(as_float(evaluator.compute(trained.model, images)), real)
            truth = first(labels, real)
            best = logits.topk(min(_TOP, size), 1).indices
            in_top5 += int((best == truth[:, None]).any(1).sum())
            predicted = logits.argmax(1)
            counts += torch.bincount((truth * size + predicted).cpu(), minlength=size * size)
            mistakes += _find_mistakes(logits.softmax(1).cpu(), truth.cpu(), predicted.cpu(), seen)
            seen += real
    mistakes.sort(key=lambda each: -each.confidence)
    return Confusion(counts.view(size, size), in_top5, mistakes)


def _find_mistakes(shares: Tensor, truth: Tensor, predicted: Tensor, first: int) -> list[Mistake]:
    """Those of a block that begins with sample `first`."""
    rows = (truth != predicted).nonzero().flatten()
    labels, taken = truth[rows], predicted[rows]
    return [
        Mistake(*row)
        for row in zip(
            (rows + first).tolist(),
            labels.tolist(),
            taken.tolist(),
            shares[rows, taken].tolist(),
            shares[rows, labels].tolist(),
            strict=True,
        )
    ]
