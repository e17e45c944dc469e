"""How lanes pass a stage with fused or compiled kernels: parts of a network, with buffers for each lane.

A network gives a lane the same bits whatever the number of lanes, so stages give the bits of `DeviceLanes`.
A stage is one part, or several if its parameters are gathered part by part.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from lockstep.data.loader import Lanes
from lockstep.kernels.loss import CrossEntropy
from lockstep.kernels.numerics import half_type
from lockstep.lower.device_lanes import make_keys, read_sums
from lockstep.lower.lane_by_lane import LaneOutput
from lockstep.lower.param_gradient import OnGradient, ghost
from lockstep.lower.program import PartNetwork, fill_weights
from lockstep.parallel.device_pipeline import DevicePipeline
from lockstep.parallel.pipelined_lanes import PipelinedLanes
from lockstep.parallel.schedule import Turn
from lockstep.parallel.shard.device_part import DevicePart, PartTables
from lockstep.parallel.shard.gathered_model import Use
from lockstep.parallel.stage_link import Passage, StageLink

_Networks = list[PartNetwork]  # one for each part


class PipelinedDevice(PipelinedLanes[_Networks]):
    """One stage's part of a worker's lanes; a lane has networks from its forward to its backward pass."""

    def __init__(self, model: nn.Module, seed: int, pipeline: DevicePipeline, link: StageLink) -> None:
        train = pipeline.whole.train
        loss, half = CrossEntropy(train.label_smoothing), half_type(train.precision)
        super().__init__(model, loss, seed, half, pipeline.position, pipeline.schedule, link)
        self._parts, gathered, self._workers = pipeline.parts, pipeline.gathered, pipeline.workers
        self._forward_uses = pipeline.uses
        self._tables = PartTables(gathered, self._parts, pipeline.uses) if gathered else None
        self._networks = [self._make_networks()]
        self._free: list[_Networks] = []
        self._on, self._arriving = (Passage(link, pipeline.position.number + way) for way in (1, -1))

    @torch.no_grad()
    def begin(self, lanes: Lanes, step: int, schedule: Sequence[Turn]) -> list[Future[list[Tensor]]]:
        self._free = list(self._networks)
        if self._tables:
            self._tables.begin([use for turn in schedule for use in self._uses(turn)])
        else:
            for part, network in zip(self._parts, self._networks[0], strict=True):
                fill_weights(part.program, network, self.model)
        count = 0 if self._position.is_first else lanes.num_lanes
        return [self._arriving.receive() for _ in range(count)]

    def pass_over(self, turn: Turn) -> None:
        if self._tables:
            self._tables.pass_over(self._uses(turn))

    def end(self) -> None:
        if self._tables:
            self._tables.end()

    @torch.no_grad()
    def forward(self, given: Sequence[Tensor], lanes: Lanes, lane: int, step: int) -> _Networks:
        networks, number, stage = self._take_networks(), lanes.first + lane, self._position
        given = [given[0].permute(0, 2, 3, 1)] if stage.is_first else given
        for part, network in zip(self._parts, networks, strict=True):
            network.enter(given)
            network.labels.copy_(lanes.lane(lane)[1])
            network.keys.copy_(make_keys(part.program, self._seed, range(number, number + 1), step))
            with self._filled(part, network, backward=False):
                network.forward()
            given = [] if stage.is_last and part is self._parts[-1] else network.leave()
        if not stage.is_last:
            self._on.send(given)
        return networks

    @torch.no_grad()
    def backward(
        self, flight: _Networks, given: Sequence[Tensor], early: OnGradient | None
    ) -> tuple[LaneOutput, Sequence[Tensor]]:
        stage, losses, found = self._position, [], dict[str, Tensor]()
        for part, network in reversed(list(zip(self._parts, flight, strict=True))):
            if not (stage.is_last and part is self._parts[-1]):
                network.enter_back(given)
            with self._filled(part, network, backward=True):
                network.backward()
                losses.append(self._read(part, network, found, early))
            given = [] if stage.is_first and part is self._parts[0] else network.leave_back()
        logits = flight[-1].logits.clone() if stage.is_last else losses[0].new_zeros(0, 1)
        grads, floats = ([found[name] for name in names] for names in (self.params, self.float_names()))
        counts = [count + 1 for count in self.int_buffers()]
        self._free.append(flight)
        return LaneOutput(losses[0], logits, grads, floats, counts), given

    def _read(
        self, part: DevicePart, network: PartNetwork, found: dict[str, Tensor], early: OnGradient | None
    ) -> Tensor:
        """Read a part's gradients and statistics; if it `hands_over`, give the gradients away. The loss."""
        tensors = {**self.params, **dict(zip(self.float_names(), self.float_buffers(), strict=True))}
        names = part.own(tensors)
        loss, values = read_sums(part.program, network, range(1), [tensors[name].detach() for name in names])
        found |= zip(names, values, strict=True)
        if self.hands_over and early:
            for index, name in enumerate(self.params):
                if name in names:
                    early(index, found[name])
                    found[name] = ghost(found[name])
        return loss

    def _uses(self, turn: Turn) -> list[Use]:
        """The blocks of parameters that a turn uses, one part after another."""
        return self._forward_uses if turn.kind == "forward" else self._forward_uses[::-1]

    def _filled(self, part: DevicePart, network: PartNetwork, backward: bool) -> AbstractContextManager[None]:
        return self._tables.filled(part, network, backward) if self._tables else nullcontext()

    def _take_networks(self) -> _Networks:
        """Networks that no lane uses: new ones if there are none, with the weights of the first."""
        if not self._free:
            made = self._make_networks()
            for network, first in zip(made, self._networks[0], strict=True):
                network.take_weights(first.weights, first.copy)
            self._networks.append(made)
            self._free.append(made)
        return self._free.pop()

    def _make_networks(self) -> _Networks:
        networks = []
        for part in self._parts:
            networks.append(part.lowering.part_network())
            networks[-1].share_with(self._workers)
            if self._tables:
                networks[-1].drop_tables()
        return networks
