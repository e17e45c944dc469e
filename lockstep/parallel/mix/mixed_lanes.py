"""Runs a worker's lanes one after another, where all workers along data compute some layers together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data.loader import Lanes
from lockstep.kernels.loss import Loss
from lockstep.lower.lane_by_lane import LaneByLane, LaneOutput
from lockstep.lower.param_gradient import OnGradient
from lockstep.parallel.mix.mix import Mix


class MixedLanes(LaneByLane):
    """The reference, in rounds; gradients of split layers are summed here, for the lanes of all workers."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        seed: int,
        half: torch.dtype | None,
        mix: Mix,
        publish: Callable[[], None],
    ) -> None:
        super().__init__(model, loss, seed, half, mix.graph)
        self._mix, self._publish = mix, publish
        self._weights = [self.params.pop(name) for name in mix.layers]

    def run(self, lanes: Lanes, step: int, early: OnGradient | None = None) -> Iterator[LaneOutput]:
        """Yield the output of each lane in order, and take part in the rounds that others have left."""
        self._mix.begin()
        self._first = lanes.first
        yield from super().run(lanes, step, early)
        for number in range(lanes.num_lanes, self._mix.rounds.count):
            self._mix.rounds.pass_over(number)

    def own_means(self) -> dict[str, Tensor]:
        """The mean gradient of this worker's rows of split layers, by the name of the weight."""
        means = self._mix.means()
        return {name: mean * self.scale.inverse for name, mean in means.items()} if self.scale else means

    def report(self) -> list[dict[str, Any]]:
        """What this worker sent for each split layer, by step."""
        return self._mix.report()

    def first_bad(self, lanes: Lanes, step: int) -> str | None:
        """Where a value is first not finite, by this worker alone, with all rows; a collective."""
        self._publish()
        alone = LaneByLane(self.model, self.loss, self._seed, self._half, self._mix.grid)
        return alone.first_bad(lanes, step)

    def _run_lane(
        self, images: Tensor, labels: Any, step: int, lane: int, early: OnGradient | None
    ) -> LaneOutput:
        self._mix.rounds.begin(lane - self._first)
        return super()._run_lane(images, labels, step, lane, early)

    def _gradients(
        self,
        outputs: list[Tensor],
        early: OnGradient | None,
        given: Sequence[Tensor] | None = None,
        inputs: Sequence[Tensor] = (),
    ) -> list[Any]:
        """The backward pass; it goes through split layers, though nothing is found for their weights."""
        found = super()._gradients(outputs, early, given, [*inputs, *self._weights])
        return found[: len(found) - len(self._weights)]
