"""How lanes pass a stage with stock kernels: some of a model's calls, forward and backward by autograd.

Every operation has the shape that it has without a pipeline, so stages give the bits of `LaneByLane`.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lockstep.data.loader import Lanes
from lockstep.kernels import random
from lockstep.kernels.loss import Loss
from lockstep.kernels.numerics import half_precision, seed_stream
from lockstep.kernels.structure import leaves
from lockstep.lower.lane_by_lane import LaneOutput
from lockstep.lower.param_gradient import OnGradient, own_gradients
from lockstep.parallel.pipeline import Pipeline
from lockstep.parallel.pipelined_lanes import PipelinedLanes
from lockstep.parallel.schedule import Turn
from lockstep.parallel.shard.gathered_model import Use
from lockstep.parallel.stage import Passed
from lockstep.parallel.stage_link import StageLink
from lockstep.parallel.stage_turn import StageTurns
from lockstep.parallel.tensor_form import is_dense


@dataclass
class _InFlight:
    """A lane between its forward and its backward pass."""

    passed: Passed
    buffers: tuple[list[Tensor], list[Tensor]]  # floating ones and integers, as the lane left them
    loss: Tensor | None = None


class PipelinedStock(PipelinedLanes[_InFlight]):
    """One stage's part of a worker's lanes, with stock kernels."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        seed: int,
        half: torch.dtype | None,
        pipeline: Pipeline,
        link: StageLink,
    ) -> None:
        super().__init__(model, loss, seed, half, pipeline.training, pipeline.schedule, link)
        self.stage, self._draws = pipeline.training, pipeline.draws

    def begin(self, lanes: Lanes, step: int, schedule: Sequence[Turn]) -> list[Future[list[Tensor]]]:
        gathered = self.stage.gathered
        if gathered:  # say in which order this step needs which blocks; the first step finds it out
            uses = [use for turn in schedule for use in self._uses(turn)]
            gathered.begin(uses if gathered.backward_uses is not None else ())
        self._turns = StageTurns(self.stage, self._link, self._draws, lanes.images.device)
        return self._turns.expect(lanes.num_lanes)

    def pass_over(self, turn: Turn) -> None:
        if self.stage.gathered:
            self.stage.gathered.pass_over(self._uses(turn))

    def end(self) -> None:
        if self.stage.gathered:
            self.stage.gathered.use_nothing()

    def _uses(self, turn: Turn) -> list[Use]:
        """The blocks of parameters that a turn uses, one call after another."""
        backward = self.stage.gathered.backward_uses if self.stage.gathered else []
        return self.stage.block_uses if turn.kind == "forward" else backward or []

    def forward(self, given: Sequence[Tensor], lanes: Lanes, lane: int, step: int) -> _InFlight:
        device, number = lanes.images.device, lanes.first + lane
        self._step, self._lane = step, number
        seed_stream(device, random.key("lane", self._seed, step, number))
        before = [*self.float_buffers(), *self.int_buffers()]
        slots = [*self._float_slots.values(), *self._int_slots.values()]
        for (table, key), buffer in zip(slots, before, strict=True):
            table[key] = buffer.clone()
        try:
            with half_precision(device, self._half):
                passed = self._turns.forward(given)
            flight = _InFlight(passed, (self.float_buffers(), self.int_buffers()))
        finally:
            for (table, key), buffer in zip(slots, before, strict=True):
                table[key] = buffer
        if self.stage.is_last:
            flight.loss = self._find_loss(passed.result, lanes.lane(lane)[1])
        return flight

    def backward(
        self, flight: _InFlight, given: Sequence[Tensor], early: OnGradient | None
    ) -> tuple[LaneOutput, list[Tensor | None]]:
        passed = flight.passed
        inputs = [tensor for tensor in passed.received if tensor.requires_grad]
        outputs, known = self._ends(flight, given)
        gathered = self.stage.gathered
        grads = [self._unused(parameter) for parameter in self.params.values()]
        back: list[Tensor | None] = [None] * len(inputs)
        if outputs and (self.params or inputs):
            with gathered.backward_pass() if gathered else nullcontext():
                found = self._gradients(outputs, early, known, inputs)
            grads, back = found[: len(grads)], found[len(grads) :]
        back = [grad if grad is None or is_dense(grad) else grad.contiguous() for grad in back]
        sent = [grad for grad in back if grad is not None]
        if not self.hands_over:
            grads = own_gradients([*sent, *grads])[len(sent) :]  # what is being sent must not be changed
        loss = passed.sent[0].new_zeros((), dtype=torch.float32) if flight.loss is None else flight.loss
        logits = loss.new_zeros(0, 1) if flight.loss is None else leaves(passed.result)[0].detach()
        return LaneOutput(loss.detach().float().clone(), logits, grads, *flight.buffers), back

    def _ends(self, flight: _InFlight, given: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor] | None]:
        """Where the backward pass begins: the loss, or what was sent and its gradients."""
        if flight.loss is not None:
            return ([self._scaled(flight.loss)], None) if flight.loss.requires_grad else ([], None)
        sent = [t for t, v in zip(flight.passed.sent, self.stage.sent, strict=True) if v.needs_grad]
        forms = self._after.forms
        assert forms is not None, "gradients have arrived"
        used = [tensor for tensor, form in zip(sent, forms, strict=True) if form]
        return used, list(given)
