"""Evaluation by the stages of a pipeline: blocks of images pass through them, and the last one counts."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.group import Group
from lockstep.comm.tree import tree_sum
from lockstep.models.tensors import buffers_kept
from lockstep.parallel.device_pipeline import DevicePipeline
from lockstep.parallel.pipeline import Pipeline
from lockstep.parallel.shard.eval_part import EvalParts
from lockstep.parallel.shard.gathered_model import Use
from lockstep.parallel.stage_link import Passage, StageLink
from lockstep.parallel.stage_turn import StageTurns
from lockstep.train.evaluation.host_evaluate import Evaluation, Evaluator
from lockstep.train.evaluation.metric import Measured


@dataclass(frozen=True, kw_only=True)
class StagedEvaluator(Evaluator):
    """Evaluates a model whose layers are on several workers; all of them get the result."""

    stages: Group  # the workers with the same blocks, in the order of their stages
    link: StageLink
    pipeline: Pipeline | DevicePipeline

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> Evaluation:
        """Evaluate in blocks of one shape; the last stage counts, and tells the others.

        All workers along `data` gather parameters as often.
        """
        found, gathered = "", self.pipeline.gathered
        if gathered:
            gathered.begin(self.uses * self._rounds)
        if self.is_last:
            found = json.dumps(asdict(super().__call__(model)))
        else:
            model.eval()
            with buffers_kept(model):
                self.pass_blocks(model)
            self.catch_up()
        self.link.flush()
        if gathered:
            gathered.use_nothing()
        last = self.stages.size - 1
        return Evaluation(**json.loads(self.stages.broadcast_bytes(found.encode(), last)))

    @property
    def is_last(self) -> bool:
        return self.stages.rank == self.stages.size - 1

    @property
    @abstractmethod
    def uses(self) -> list[Use]:
        """The blocks of parameters that a block of images needs, one after another, if they are gathered."""

    def catch_up(self) -> None:
        """Gather for blocks of images that only other workers along `data` have."""
        if self.pipeline.gathered:
            self.pipeline.gathered.pass_over(self.uses * (self._rounds - len(self.own)))

    @property
    def _rounds(self) -> int:
        """The most blocks of images of a worker."""
        return -(-self.num_blocks // self.group.size)

    @abstractmethod
    def pass_blocks(self, model: nn.Module) -> None:
        """Compute all blocks, and send them to the next stage."""


@dataclass(frozen=True, kw_only=True)
class PipelinedEvaluator(StagedEvaluator):
    """Evaluates with stock kernels."""

    pipeline: Pipeline

    @property
    def uses(self) -> list[Use]:
        return self.pipeline.evaluation.block_uses

    def pass_blocks(self, model: nn.Module) -> None:
        forward = self._stage_forward()
        for images, _, _ in self.seeded_blocks():
            self.compute(forward, images)

    def measure(self, model: Any, measured: Measured) -> tuple[Tensor, Tensor]:
        """As for a whole model, with what arrives from the stage before in place of images."""
        return super().measure(self._stage_forward(), measured)

    def _stage_forward(self) -> Callable[[Tensor], Any]:
        stage = self.pipeline.evaluation
        turns = StageTurns(stage, self.link, self.pipeline.draws, self.device)
        arriving = turns.expect(len(self.own))

        def forward(images: Tensor) -> Any:
            return turns.forward([images] if stage.is_first else arriving.pop(0).result()).result

        return forward


@dataclass(frozen=True, kw_only=True)
class PipelinedDeviceEvaluator(StagedEvaluator):
    """Evaluates with fused or compiled kernels, in networks of this stage's parts for one block of images.

    A block's sum is that of `DeviceEvaluator`.
    """

    pipeline: DevicePipeline

    @property
    def uses(self) -> list[Use]:
        return self.pipeline.uses

    def pass_blocks(self, model: nn.Module) -> None:
        for _, _, given in self._computed(model):
            self._after.send(given)

    def measure(self, model: nn.Module, measured: Measured) -> tuple[Tensor, Tensor]:
        sums = []
        for labels, real, _ in self._computed(model):
            network = self._parts.last
            network.labels.copy_(labels)
            network.score()
            for scores in (network.loss, network.right):
                masked = scores.clone()
                masked[real:] = 0.0
                sums.append(tree_sum(masked[:, None])[0])
        return torch.stack(sums[::2]), torch.stack(sums[1::2]).sum().to(torch.int64)

    def _computed(self, model: nn.Module) -> Iterator[tuple[Any, int, list[Tensor]]]:
        """Compute this stage of every block: its labels, how many samples are real, what it sends."""
        parts = self._parts
        parts.begin(model)
        arriving = [self._before.receive() for _ in self.own] if self.stages.rank else []
        for images, labels, real in self.seeded_blocks():
            given = arriving.pop(0).result() if self.stages.rank else [images.permute(0, 2, 3, 1)]
            yield labels, real, parts.forward(model, given, sends=not self.is_last)
        parts.end()

    @cached_property
    def _parts(self) -> EvalParts:
        return EvalParts(self.pipeline.parts, self.pipeline.gathered, self.uses)

    @cached_property
    def _before(self) -> Passage:
        return Passage(self.link, self.stages.rank - 1)

    @cached_property
    def _after(self) -> Passage:
        return Passage(self.link, self.stages.rank + 1)


def stage_evaluator(
    stock: Evaluator, pipeline: Pipeline | DevicePipeline, stages: Group, link: StageLink
) -> StagedEvaluator:
    """The evaluator of one stage, for the images of `stock`."""
    given = {**vars(stock), "stages": stages, "link": link}
    if isinstance(pipeline, Pipeline):
        return PipelinedEvaluator(**given, pipeline=pipeline)
    return PipelinedDeviceEvaluator(**given, pipeline=pipeline)
