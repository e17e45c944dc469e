"""The workers along `channel` with fused or compiled kernels: each gives the others its part of a result."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lockstep.comm.group import Group
from lockstep.kernels.stock.product_cut import LayerCuts
from lockstep.lower.layer_split import InParts
from lockstep.parallel.split.axes import CHANNEL
from lockstep.parallel.split.layer_clock import LayerClock

_ALIGN = 16  # bytes: a type needs its values to begin at a multiple of its size


@dataclass(eq=False)
class ChannelWorkers:
    """This worker's group along `channel`, and what is sent in it for each layer."""

    group: Group
    clock: LayerClock = field(default_factory=LayerClock)
    is_silent: bool = False  # nothing is exchanged while kernels are only compiled
    cuts: dict[str, LayerCuts] = field(default_factory=dict)  # of a compiled model's layers, by name

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def places(self) -> dict[str, int]:
        return {layer: cuts.place for layer, cuts in self.cuts.items()}

    def make_whole(self, layer: str, tensors: Sequence[InParts]) -> None:
        """Fill in what the others have, in one exchange for all tensors."""
        if not tensors or self.is_silent:
            return
        start, group, device = time.perf_counter(), self.group, tensors[0].tensor.device
        sizes = [sum(_bytes_of(shared, worker) for shared in tensors) for worker in range(group.size)]
        mine = [
            _padded(_part(shared, group.rank).contiguous().view(-1).view(torch.uint8))
            for shared in tensors
            if len(shared.ranges[group.rank])
        ]
        flat = torch.cat(mine) if mine else torch.empty(0, dtype=torch.uint8, device=device)
        others = group.size - 1
        received = [0 if worker == group.rank else size for worker, size in enumerate(sizes)]
        sent = [0 if worker == group.rank else len(flat) for worker in range(group.size)]
        arrived = torch.empty(sum(received), dtype=torch.uint8, device=device)
        group.all_to_all(arrived, flat.repeat(others), received, sent)
        first = 0
        for worker in range(group.size):
            for shared in tensors if worker != group.rank else ():
                part = _part(shared, worker)
                if part.numel():
                    values = arrived[first : first + part.numel() * part.element_size()]
                    part.copy_(values.view(part.dtype).view(part.shape))
                    first += _bytes_of(shared, worker)
        self.clock.sent(CHANNEL, layer, others * len(flat), start)


def _part(shared: InParts, worker: int) -> Tensor:
    own = shared.ranges[worker]
    return shared.tensor.narrow(shared.dim, own.start, len(own))


def _bytes_of(shared: InParts, worker: int) -> int:
    part = _part(shared, worker)
    return -(-part.numel() * part.element_size() // _ALIGN) * _ALIGN


def _padded(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values, (0, -len(values) % _ALIGN))
