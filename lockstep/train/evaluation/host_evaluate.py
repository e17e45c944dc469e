"""Evaluation through the host: every sample once, in blocks as large as a lane, counted in integers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.group import Group
from lockstep.comm.tree import tree_sum
from lockstep.data.augment import Augment
from lockstep.data.loader import eval_blocks
from lockstep.data.store import Split
from lockstep.kernels import random
from lockstep.kernels.loss import Loss, WholeLoss
from lockstep.kernels.numerics import half_precision, half_type, memory_format, seed_stream
from lockstep.kernels.structure import as_float, first
from lockstep.models.tensors import buffers_kept, float_state
from lockstep.spec import Run
from lockstep.train.evaluation.metric import Measured, Metrics


@dataclass(frozen=True)
class Evaluation:
    """The mean loss; how many samples were classified correctly; further metrics."""

    loss: float
    correct: int | None  # None if the model is no classifier
    samples: int
    metrics: dict[str, float] = field(default_factory=dict, hash=False)

    @property
    def accuracy(self) -> float | None:
        """The share of correct samples; None if the model is no classifier."""
        return None if self.correct is None else self.correct / self.samples


@dataclass(frozen=True)
class Evaluator:
    """Evaluates a model on a split; the same for training, `lockstep eval` and the API."""

    run: Run
    split: Split
    augment: Augment
    loss: Loss
    device: torch.device
    group: Group = field(default_factory=Group)
    metrics: Metrics = field(default_factory=dict)

    @property
    def block(self) -> int:
        """Samples per block: as many as per lane."""
        return self.run.train.batch // self.run.train.lanes

    @property
    def num_blocks(self) -> int:
        return -(-len(self.split) // self.block)

    @property
    def own(self) -> range:
        """The blocks of this worker: every W-th, with W workers."""
        return range(self.group.rank, self.num_blocks, self.group.size)

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> Evaluation:
        """Evaluate in blocks of one shape, the last padded and masked; a fixed tree sums their losses."""
        model.eval()
        size, own = self.group.size, self.own
        measured = Measured(self.metrics)
        mine = torch.zeros(-(-self.num_blocks // size), device=self.device)
        correct = torch.zeros((), dtype=torch.int64, device=self.device)
        if own:
            with buffers_kept(model):
                mine[: len(own)], correct = self.measure(model, measured)
        self.catch_up()
        every, counts = mine.new_zeros(size, len(mine)), correct.new_zeros(size)
        self.group.all_gather(every, mine)
        self.group.all_gather(counts, correct)
        total = float(tree_sum(every.t().flatten()[: self.num_blocks]) / len(self.split))
        correct_everywhere = None if isinstance(self.loss, WholeLoss) else int(counts.sum())
        found = measured.gather(self.group, self.num_blocks)
        self.group.check()  # what was gathered is wrong if NCCL was aborted
        return Evaluation(total, correct_everywhere, len(self.split), found)

    def catch_up(self) -> None:
        """Do what other workers need for blocks that this one does not have."""

    def seeded_blocks(self) -> Iterator[tuple[Tensor, Any, int]]:
        """Images, labels and the number of real samples of each of this worker's blocks.

        Before each one the generator is seeded, since a model or a loss may draw random numbers.
        """
        blocks = eval_blocks(self.split, self.augment, self.block, self.device, self.own)
        for number, block in zip(self.own, blocks, strict=True):
            seed_stream(self.device, random.key("evaluate", self.run.seed, number))
            yield block

    def compute(self, model: Callable[[Tensor], Any], images: Tensor) -> Any:
        """What the model gives for a block."""
        with half_precision(self.device, half_type(self.run.train.precision)):
            return model(images.contiguous(memory_format=memory_format(self.run)))

    def measure(self, model: Any, measured: Measured) -> tuple[Tensor, Tensor]:
        """The summed loss of each of this worker's blocks, and the number of correct samples in all.

        `measured` takes the outputs of each block.
        """
        losses: list[Tensor] = []
        correct = torch.zeros((), dtype=torch.int64, device=self.device)
        for images, labels, real in self.seeded_blocks():
            outputs, truth = first(as_float(self.compute(model, images)), real), first(labels, real)
            losses.append(self.loss(outputs, truth).float() * real)
            measured.add(outputs, truth, real)
            if not isinstance(self.loss, WholeLoss):
                correct += (outputs.argmax(1) == truth).sum()
        return torch.stack(losses), correct


@contextmanager
def averaged_weights(model: nn.Module, ema: dict[str, Tensor]) -> Iterator[None]:
    """Give the model its averaged weights, if the run keeps them; restore its own at the end."""
    if not ema:
        yield
        return
    own, live = float_state(model, copy=True), float_state(model)
    torch._foreach_copy_(list(live.values()), list(ema.values()))
    try:
        yield
    finally:
        torch._foreach_copy_(list(live.values()), list(own.values()))
