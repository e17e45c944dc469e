"""Runs a worker's lanes through its stage of a pipeline: lanes are the micro-batches.

A gradient starts here: backward → lane tree → optimizer. How a lane passes the stage, `pipelined_stock` and
`pipelined_device` say.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from lockstep.data.loader import Lanes
from lockstep.kernels.loss import Loss
from lockstep.lower.lane_by_lane import LaneByLane, LaneOutput
from lockstep.lower.param_gradient import OnGradient
from lockstep.parallel.schedule import Position, Turn, make_schedule
from lockstep.parallel.stage_clock import StageClock
from lockstep.parallel.stage_link import Passage, StageLink

Flight = TypeVar("Flight")  # a lane between its forward and its backward pass


class PipelinedLanes(LaneByLane, ABC, Generic[Flight]):
    """One stage's part of a worker's lanes, in the order of a schedule."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        seed: int,
        half: torch.dtype | None,
        position: Position,
        schedule: str,
        link: StageLink,
    ) -> None:
        super().__init__(model, loss, seed, half)
        self._position, self._schedule, self._link, self._clock = position, schedule, link, StageClock()
        self._after, self._before = (Passage(link, position.number + way) for way in (1, -1))  # gradients
        self.rounds = 0  # the most lanes of a worker along `data`, if they must take turns together

    @abstractmethod
    def begin(self, lanes: Lanes, step: int, schedule: Sequence[Turn]) -> list[Future[list[Tensor]]]:
        """Make ready for a step, and start to receive what its lanes need; the first stage gets images."""

    @abstractmethod
    def forward(self, given: Sequence[Tensor], lanes: Lanes, lane: int, step: int) -> Flight:
        """A lane's forward pass from what arrived, or images; sends on what the next stage needs."""

    @abstractmethod
    def backward(
        self, flight: Flight, given: Sequence[Tensor], early: OnGradient | None
    ) -> tuple[LaneOutput, Sequence[Tensor | None]]:
        """A lane's output, and the gradients for the stage before; `given` are those of what was sent."""

    def pass_over(self, turn: Turn) -> None:
        """Do what other workers along `data` need for a lane that only they have."""

    def end(self) -> None:
        """Free what only a step needs."""

    def run(self, lanes: Lanes, step: int, early: OnGradient | None = None) -> Iterator[LaneOutput]:
        """Yield the output of each lane in order; only the last stage has a loss and logits."""
        self.model.train()
        stage, count, clock = self._position, lanes.num_lanes, self._clock
        schedule = make_schedule(self._schedule, stage.number, stage.count, max(self.rounds, count))
        inputs, waiting = self.begin(lanes, step, schedule), {}
        grads = [] if stage.is_last else [self._after.receive() for _ in range(count)]
        for turn in schedule:
            if turn.lane >= count:
                self.pass_over(turn)
            elif turn.kind == "forward":
                with clock.busy(turn):
                    given = clock.wait(inputs.pop(0)) if inputs else [lanes.lane(turn.lane)[0]]
                    waiting[turn.lane] = self.forward(given, lanes, turn.lane, step)
                clock.in_flight = max(clock.in_flight, len(waiting))
            else:
                last = self.hands_over or turn.lane == count - 1
                with clock.busy(turn):
                    given = clock.wait(grads.pop(0)) if grads else []
                    output, back = self.backward(waiting.pop(turn.lane), given, early if last else None)
                    if not stage.is_first:
                        self._before.send(back)
                yield output
        self.end()
        self._link.flush()
        clock.end_step()

    def report(self, device: torch.device) -> dict[str, Any]:
        """How this stage spent its time, per step."""
        return self._clock.report(self._position.number, self._link.num_bytes, device)

    def first_bad(self, lanes: Lanes, step: int) -> str | None:
        """Where a value is first not finite, as far as this stage can tell: the images or a parameter."""
        if self._position.is_first and not lanes.images.isfinite().all():
            return "the images"
        bad = [name for name, parameter in self.params.items() if not parameter.isfinite().all()]
        return f"parameter '{bad[0]}'" if bad else None

    def release(self) -> None:
        """Restore the model, and end the link's threads."""
        super().release()
        self._link.close()
