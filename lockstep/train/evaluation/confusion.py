"""Which classes a trained run takes for which: counts by label and prediction, and the top-5 accuracy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.data import Split
from lockstep.errors import ModelError
from lockstep.kernels.structure import as_float, first
from lockstep.models.tensors import buffers_kept
from lockstep.runs.trained_run import Trained
from lockstep.train.evaluation.evaluate import find_loss, prepared, stock_evaluator

_TOP = 5


@dataclass(frozen=True)
class Confusion:
    """`counts` [label, prediction] of samples, and how many had their label among the five most likely."""

    counts: Tensor
    in_top5: int

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


@torch.no_grad()
def count_confusions(trained: Trained, split: Split) -> Confusion:
    """Classify every sample of a split, with stock kernels."""
    if not trained.is_classifier:
        raise ModelError(f"{trained.directory} is no classifier: it has no classes to count by")
    size, in_top5 = len(trained.classes), 0
    counts = torch.zeros(size * size, dtype=torch.int64)
    with prepared(trained), buffers_kept(trained.model):
        trained.model.eval()
        evaluator = stock_evaluator(trained, split, find_loss(trained, None), None)
        for images, labels, real in evaluator.seeded_blocks():
            logits = first(as_float(evaluator.compute(trained.model, images)), real)
            truth = first(labels, real)
            best = logits.topk(min(_TOP, size), 1).indices
            in_top5 += int((best == truth[:, None]).any(1).sum())
            counts += torch.bincount((truth * size + logits.argmax(1)).cpu(), minlength=size * size)
    return Confusion(counts.view(size, size), in_top5)
