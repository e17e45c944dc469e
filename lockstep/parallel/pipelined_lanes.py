"""Runs a worker's lanes through its stage of a pipeline: lanes are the micro-batches.

A gradient starts here: backward → lane tree → optimizer. Every operation has the shape that it has without a
pipeline, so stages give the bits of `LaneByLane`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data.loader import Lanes
from lockstep.kernels import random
from lockstep.kernels.loss import Loss
from lockstep.kernels.numerics import half_precision, seed_stream
from lockstep.kernels.structure import leaves
from lockstep.lower.lane_by_lane import LaneByLane, LaneOutput, OnGradient, own_gradients
from lockstep.parallel.pipeline import Pipeline
from lockstep.parallel.schedule import Turn, make_schedule
from lockstep.parallel.stage import Passed
from lockstep.parallel.stage_clock import StageClock
from lockstep.parallel.stage_link import StageLink
from lockstep.parallel.stage_turn import StageTurns
from lockstep.parallel.tensor_form import Form, form_of, is_dense


@dataclass
class _InFlight:
    """A lane between its forward and its backward pass."""

    passed: Passed
    buffers: tuple[list[Tensor], list[Tensor]]  # floating ones and integers, as the lane left them
    loss: Tensor | None = None


@dataclass
class _Arriving:
    """What is on its way to this stage: a future for each lane, in order."""

    inputs: list[Future[list[Tensor]]]
    grads: list[Future[list[Tensor]]]


class PipelinedLanes(LaneByLane):
    """One stage's part of a worker's lanes."""

    def __init__(
        self, model: nn.Module, loss: Loss, seed: int, bf16: bool, pipeline: Pipeline, link: StageLink
    ) -> None:
        super().__init__(model, loss, seed, bf16)
        self.stage, self._schedule, self._draws = pipeline.training, pipeline.schedule, pipeline.draws
        self._link, self._clock = link, StageClock()
        self.rounds = 0  # the most lanes of a worker along `data`, if its parameters are gathered
        # the form of each gradient that comes back, or None if there is none; known after the first lane
        self._grad_forms: list[Form | None] | None = None
        self._told_forms: list[Form | None] | None = None

    def run(self, lanes: Lanes, step: int, early: OnGradient | None = None) -> Iterator[LaneOutput]:
        """Yield the output of each lane in order; only the last stage has a loss and logits."""
        self.model.train()
        stage, count = self.stage, lanes.num_lanes
        turns = StageTurns(stage, self._link, self._draws, lanes.images.device)
        arriving, waiting = self._expect(turns, count), {}
        schedule = make_schedule(self._schedule, stage.number, stage.count, max(self.rounds, count))
        self._begin_gathering(schedule)
        for turn in schedule:
            if turn.lane >= count:
                self._pass_over(turn)
            elif turn.kind == "forward":
                with self._clock.busy(turn):
                    waiting[turn.lane] = self._forward(turns, lanes, turn.lane, step, arriving)
                self._clock.in_flight = max(self._clock.in_flight, len(waiting))
            else:
                last = self.hands_over or turn.lane == count - 1
                with self._clock.busy(turn):
                    output = self._backward(waiting.pop(turn.lane), arriving, early if last else None)
                yield output
        if stage.gathered:
            stage.gathered.use_nothing()
        self._link.flush()
        self._clock.end_step()

    def _begin_gathering(self, schedule: Sequence[Turn]) -> None:
        """Say in which order this step will need which blocks; the first step finds it out."""
        gathered = self.stage.gathered
        if gathered:
            known = {"forward": self.stage.block_uses, "backward": gathered.backward_uses}
            uses = [use for turn in schedule for use in known[turn.kind] or ()]
            gathered.begin(uses if gathered.backward_uses is not None else ())

    def _pass_over(self, turn: Turn) -> None:
        """Gather for a lane that only other workers along `data` have."""
        gathered = self.stage.gathered
        assert gathered
        backward = gathered.backward_uses or []
        gathered.pass_over(self.stage.block_uses if turn.kind == "forward" else backward)

    def report(self, device: torch.device) -> dict[str, Any]:
        """How this stage spent its time, per step."""
        return self._clock.report(self.stage.number, self._link.num_bytes, device)

    def first_bad(self, lanes: Lanes, step: int) -> str | None:
        """Where a value is first not finite, as far as this stage can tell: the images or a parameter."""
        if self.stage.is_first and not lanes.images.isfinite().all():
            return "the images"
        bad = [name for name, parameter in self.params.items() if not parameter.isfinite().all()]
        return f"parameter '{bad[0]}'" if bad else None

    def release(self) -> None:
        """Restore the model, and end the link's threads."""
        super().release()
        self._link.close()

    def _expect(self, turns: StageTurns, count: int) -> _Arriving:
        """Start to receive what all lanes of this step will need."""
        grads: list[Future[list[Tensor]]] = []
        if not self.stage.is_last:
            after = self.stage.number + 1
            grads = [self._link.receive(after, self._ask_grad_forms) for _ in range(count)]
        return _Arriving(turns.expect(count), grads)

    def _forward(
        self, turns: StageTurns, lanes: Lanes, lane: int, step: int, arriving: _Arriving
    ) -> _InFlight:
        stage, (images, labels) = self.stage, lanes.lane(lane)
        given = [images] if stage.is_first else self._clock.wait(arriving.inputs.pop(0))
        self._step, self._lane = step, lanes.first + lane
        seed_stream(images.device, random.key("lane", self._seed, step, lanes.first + lane))
        before = [*self.float_buffers(), *self.int_buffers()]
        slots = [*self._float_slots.values(), *self._int_slots.values()]
        for (table, key), buffer in zip(slots, before, strict=True):
            table[key] = buffer.clone()
        try:
            with half_precision(images.device, self._bf16):
                passed = turns.forward(given)
            flight = _InFlight(passed, (self.float_buffers(), self.int_buffers()))
        finally:
            for (table, key), buffer in zip(slots, before, strict=True):
                table[key] = buffer
        if stage.is_last:
            flight.loss = self._find_loss(passed.result, labels)
        return flight

    def _backward(self, flight: _InFlight, arriving: _Arriving, early: OnGradient | None) -> LaneOutput:
        stage, passed = self.stage, flight.passed
        inputs = [tensor for tensor in passed.received if tensor.requires_grad]
        outputs, given = self._ends(flight, arriving)
        grads = [self._unused(parameter) for parameter in self.params.values()]
        back: list[Tensor | None] = [None] * len(inputs)
        if outputs and (self.params or inputs):
            with stage.gathered.backward_pass() if stage.gathered else nullcontext():
                found = self._gradients(outputs, early, given, inputs)
            grads, back = found[: len(grads)], found[len(grads) :]
        sent = [] if stage.is_first else self._send_back(back)
        if not self.hands_over:
            grads = own_gradients([*sent, *grads])[len(sent) :]  # what is being sent must not be changed
        loss = passed.sent[0].new_zeros((), dtype=torch.float32) if flight.loss is None else flight.loss
        logits = loss.new_zeros(0, 1) if flight.loss is None else leaves(passed.result)[0].detach()
        return LaneOutput(loss.detach().float().clone(), logits, grads, *flight.buffers)

    def _ends(self, flight: _InFlight, arriving: _Arriving) -> tuple[list[Tensor], list[Tensor] | None]:
        """Where the backward pass begins: the loss, or what was sent and its gradients."""
        if flight.loss is not None:
            return ([flight.loss], None) if flight.loss.requires_grad else ([], None)
        arrived: list[Tensor] = self._clock.wait(arriving.grads.pop(0))
        found = iter(arrived)
        sent = [t for t, v in zip(flight.passed.sent, self.stage.sent, strict=True) if v.needs_grad]
        assert self._grad_forms is not None
        pairs = [(t, next(found)) for t, form in zip(sent, self._grad_forms, strict=True) if form]
        return [tensor for tensor, _ in pairs], [grad for _, grad in pairs]

    def _send_back(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """Send the gradients of what arrived; before the first lane's, which there are and their form."""
        dense = [grad if grad is None or is_dense(grad) else grad.contiguous() for grad in grads]
        forms = [None if grad is None else form_of(grad) for grad in dense]
        before = self.stage.number - 1
        if self._told_forms is None:
            self._told_forms = forms
            self._link.send_text(before, [form and form.dump() for form in forms])
        assert forms == self._told_forms, "gradients of another form than in the first lane"
        sent = [grad for grad in dense if grad is not None]
        self._link.send(before, sent)
        return sent

    def _ask_grad_forms(self) -> list[Form]:
        """The forms of the gradients that come back; the next stage tells them before the first lane's."""
        if self._grad_forms is None:
            told: Any = self._link.receive_text(self.stage.number + 1)
            self._grad_forms = [form and Form.load(form) for form in told]
        return [form for form in self._grad_forms if form]
