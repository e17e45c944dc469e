"""Runs a worker's lanes on a fused or compiled network; the device's counterpart of `lane_by_lane.py`.

A gradient starts here: backward → lane tree → bucket → … → optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from lockstep.comm.group import Group
from lockstep.comm.tree import subtrees, worker_lanes
from lockstep.data.loader import Lanes
from lockstep.kernels import random
from lockstep.kernels.loss import CrossEntropy
from lockstep.kernels.numerics import half_type
from lockstep.lower.flat_table import DeviceNetwork, fill_inside
from lockstep.lower.lane_by_lane import LaneByLane, LaneOutput
from lockstep.lower.layer_split import LaneWorkers
from lockstep.lower.param_gradient import OnGradient
from lockstep.lower.program import DeviceLowering, PartNetwork, Program, fill_weights


class DeviceLanes(LaneByLane):
    """Runs the lanes of a model in the buffers of a network."""

    def __init__(
        self, model: nn.Module, lowering: DeviceLowering, seed: int, group: Group | None = None
    ) -> None:
        train = lowering.train
        super().__init__(model, CrossEntropy(train.label_smoothing), seed, half_type(train.precision))
        self.program, self._lowering, self._group = lowering.program, lowering, group or Group()
        self.workers: LaneWorkers | None = None  # those of the same lanes, to whom products are dealt out

    def network(self, lanes: int) -> DeviceNetwork:
        """The network, with its buffers, for this number of lanes."""
        return self._join(self._lowering.network(lanes))

    def _join(self, network: DeviceNetwork) -> DeviceNetwork:
        """Let its batch norms see the lanes of all workers, and deal its products out."""
        network.all_lanes = self._all_lanes
        network.share_with(self.workers)
        return network

    @torch.no_grad()
    def run(self, lanes: Lanes, step: int, early: OnGradient | None = None) -> Iterator[LaneOutput]:
        """One output for each maximal aligned subtree of the lanes: the sum over it."""
        self.model.train()
        own = lanes.numbers
        network = self._join(self._lowering.network_at_hand(lanes.num_lanes))
        self._fill(network, lanes, self.dropout_keys(own, step))
        network.compute()
        for first, height in self.roots(own):
            yield self._output(network, range(first - own.start, first - own.start + (1 << height)), height)

    def roots(self, own: range) -> list[tuple[int, int]]:
        """The subtrees that a worker sums by itself; single lanes if each is rounded or compressed."""
        train = self._lowering.train
        is_plain = train.wire == "fp32" and train.compress == "none"
        return subtrees(own) if is_plain else [(lane, 0) for lane in own]

    def _all_lanes(self, own: Tensor) -> Tensor:
        """[L, …] of this worker's lanes → [V, …] of all workers', in order; fewer of one stand for all."""
        group, total = self._group, self._lowering.train.lanes
        if group.size == 1:
            return own.repeat(total // len(own), *[1] * (own.dim() - 1)) if len(own) < total else own
        counts = [len(worker_lanes(total, group.size, rank)) for rank in range(group.size)]
        mine = own.new_zeros(max(counts), *own.shape[1:])
        mine[: len(own)] = own
        every = mine.new_empty(group.size, *mine.shape)
        group.all_gather(every, mine)
        return torch.cat([rows[:count] for rows, count in zip(every, counts, strict=True)])

    def _fill(self, network: DeviceNetwork, lanes: Lanes, keys: Tensor) -> None:
        """Copy images, labels, weights and dropout keys to the buffers that the kernels read."""
        fill_inside(network.x[0][: len(lanes.labels)], lanes.images.permute(0, 2, 3, 1))
        network.labels[: len(lanes.labels)].copy_(lanes.labels)
        fill_weights(self.program, network, self.model)
        if network.scale is not None and self.scale:
            network.scale.copy_(torch.tensor([self.scale.value, self.scale.inverse]))
        network.keys[:, : lanes.num_lanes].copy_(keys)

    def _output(self, network: DeviceNetwork, lanes: range, height: int) -> LaneOutput:
        return read_output(self, self.program, network, lanes, height)

    def dropout_keys(self, lanes: range, step: int) -> Tensor:
        """A dropout key for each layer and lane of a step."""
        return make_keys(self.program, self._seed, lanes, step)


def read_output(
    way: LaneByLane, program: Program, network: DeviceNetwork | PartNetwork, lanes: range, height: int
) -> LaneOutput:
    """The sum over a subtree of a network's lanes, as tensors of the model."""
    params, size = list(way.params.values()), network.lane_size
    loss, found = read_sums(program, network, lanes, [*params, *way.float_buffers()])
    logits = network.logits[lanes.start * size : lanes.stop * size].clone()
    counts = [count + 1 for count in way.int_buffers()]
    return LaneOutput(loss, logits, found[: len(params)], found[len(params) :], counts, height)


def read_sums(
    program: Program, network: DeviceNetwork | PartNetwork, lanes: range, like: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """The summed loss of some lanes, their gradients and statistics; `like` are those of its blocks."""
    layout, device = network.layout, network.logits.device
    flat = torch.empty(layout.size, device=device)
    network.sum_lanes(lanes, flat, torch.zeros(1, dtype=torch.int32, device=device))
    found = [torch.empty_like(tensor) for tensor in like]
    program.from_flat(layout, flat, found)
    return flat[layout.loss].clone(), found


def make_keys(program: Program, seed: int, lanes: range, step: int) -> Tensor:
    """A dropout key for each layer and lane of a step."""
    keys = [
        [random.key("dropout", seed, step, lane, name) if name else 0 for lane in lanes]
        for name in program.drops
    ]
    return torch.tensor(keys, dtype=torch.int64).view(len(keys), len(lanes))
