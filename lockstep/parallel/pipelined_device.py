"""How lanes pass a stage with fused or compiled kernels: a part of a network, with buffers for each lane.

A network gives a lane the same bits whatever the number of lanes, so stages give the bits of `DeviceLanes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import torch
from torch import Tensor, nn

from lockstep.data.loader import Lanes
from lockstep.kernels.loss import CrossEntropy
from lockstep.lower.device_lanes import make_keys, read_output
from lockstep.lower.lane_by_lane import LaneOutput, OnGradient
from lockstep.lower.program import PartNetwork, fill_weights
from lockstep.parallel.device_pipeline import DevicePipeline
from lockstep.parallel.pipelined_lanes import PipelinedLanes
from lockstep.parallel.schedule import Turn
from lockstep.parallel.stage_link import Passage, StageLink


class PipelinedDevice(PipelinedLanes[PartNetwork]):
    """One stage's part of a worker's lanes; a lane has a network from its forward to its backward pass."""

    def __init__(self, model: nn.Module, seed: int, pipeline: DevicePipeline, link: StageLink) -> None:
        train = pipeline.lowering.train
        loss, bf16 = CrossEntropy(train.label_smoothing), train.precision == "bf16"
        super().__init__(model, loss, seed, bf16, pipeline.position, pipeline.schedule, link)
        self._lowering, self._program = pipeline.lowering, pipeline.lowering.program
        self._networks = [self._lowering.part_network()]
        self._free: list[PartNetwork] = []
        self._on, self._arriving = (Passage(link, pipeline.position.number + way) for way in (1, -1))

    @torch.no_grad()
    def begin(self, lanes: Lanes, step: int, schedule: Sequence[Turn]) -> list[Future[list[Tensor]]]:
        fill_weights(self._program, self._networks[0], self.model)
        self._free = list(self._networks)
        count = 0 if self._position.is_first else lanes.num_lanes
        return [self._arriving.receive() for _ in range(count)]

    @torch.no_grad()
    def forward(self, given: Sequence[Tensor], lanes: Lanes, lane: int, step: int) -> PartNetwork:
        network, number = self._take_network(), lanes.first + lane
        network.enter([given[0].permute(0, 2, 3, 1)] if self._position.is_first else given)
        network.labels.copy_(lanes.lane(lane)[1])
        network.keys.copy_(make_keys(self._program, self._seed, range(number, number + 1), step))
        network.forward()
        if not self._position.is_last:
            self._on.send(network.leave())
        return network

    @torch.no_grad()
    def backward(
        self, flight: PartNetwork, given: Sequence[Tensor], early: OnGradient | None
    ) -> tuple[LaneOutput, list[Tensor]]:
        if not self._position.is_last:
            flight.enter_back(given)
        flight.backward()
        output = read_output(self, self._program, flight, range(1), 0)
        if not self._position.is_last:
            output = replace(output, logits=output.loss.new_zeros(0, 1))
        back = [] if self._position.is_first else flight.leave_back()
        self._free.append(flight)
        return output, back

    def _take_network(self) -> PartNetwork:
        """A network that no lane uses: a new one if there is none, with the weights of the first."""
        if not self._free:
            self._networks.append(self._lowering.part_network())
            self._networks[-1].share_weights(self._networks[0])
            self._free.append(self._networks[-1])
        return self._free.pop()
