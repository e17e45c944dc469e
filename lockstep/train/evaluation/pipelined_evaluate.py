"""Evaluation by the stages of a pipeline: blocks of images pass through them, and the last one counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.group import Group
from lockstep.models.tensors import buffers_kept
from lockstep.parallel.pipeline import Pipeline
from lockstep.parallel.stage_link import StageLink
from lockstep.parallel.stage_turn import StageTurns
from lockstep.train.evaluation.host_evaluate import Evaluation, Evaluator
from lockstep.train.evaluation.metric import Row


@dataclass(frozen=True, kw_only=True)
class PipelinedEvaluator(Evaluator):
    """Evaluates a model whose layers are on several workers; all of them get the result."""

    pipeline: Pipeline
    stages: Group  # the workers with the same blocks, in the order of their stages
    link: StageLink

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> Evaluation:
        """Evaluate in blocks of one shape; the last stage counts, and tells the others."""
        found, gathered = "", self.pipeline.evaluation.gathered
        if gathered:
            gathered.begin(self.pipeline.evaluation.block_uses * -(-self.num_blocks // self.group.size))
        if self.pipeline.evaluation.is_last:
            found = json.dumps(asdict(super().__call__(model)))
        else:
            model.eval()
            forward = self._stage_forward()
            with buffers_kept(model):
                for images, _, _ in self.seeded_blocks():
                    self.compute(forward, images)
            self.catch_up()
        self.link.flush()
        if gathered:
            gathered.use_nothing()
        last = self.stages.size - 1
        return Evaluation(**json.loads(self.stages.broadcast_bytes(found.encode(), last)))

    def measure(self, model: Any, rows: list[Row]) -> tuple[Tensor, Tensor]:
        """As for a whole model, with what arrives from the stage before in place of images."""
        return super().measure(self._stage_forward(), rows)

    def catch_up(self) -> None:
        """Gather for blocks of images that only other workers along `data` have."""
        stage = self.pipeline.evaluation
        left = -(-self.num_blocks // self.group.size) - len(self.own)
        if stage.gathered:
            stage.gathered.pass_over(stage.block_uses * left)

    def _stage_forward(self) -> Callable[[Tensor], Any]:
        stage = self.pipeline.evaluation
        turns = StageTurns(stage, self.link, self.pipeline.draws, self.device)
        arriving = turns.expect(len(self.own))

        def forward(images: Tensor) -> Any:
            return turns.forward([images] if stage.is_first else arriving.pop(0).result()).result

        return forward
