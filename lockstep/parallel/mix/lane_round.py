"""Rounds: in the i-th, every worker along data computes the i-th of its lanes, if it has so many.

What the workers exchange in a round is the same for all, and one without a lane takes part in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.comm.group import Group
from lockstep.comm.tree import worker_lanes
from lockstep.parallel.split.layer_clock import Traffic

_ALIGN = 64  # bytes: where a tensor of its own begins, since kernels may choose other algorithms elsewhere


@dataclass(frozen=True)
class LaneForm:
    """A lane at a layer: so many samples of a type."""

    samples: int
    dtype: torch.dtype
    device: torch.device

    def shaped(self, width: int) -> Tensor:
        """A tensor [N, width] without memory."""
        return torch.empty((), dtype=self.dtype, device=self.device).expand(self.samples, width)


class LaneRound:
    """The round that is computed now: who has a lane in it, and the exchanges of all layers, in order."""

    def __init__(self, group: Group, lanes: int) -> None:
        self.group = group
        self.lanes_of_all = [worker_lanes(lanes, group.size, rank) for rank in range(group.size)]
        self.count = max(map(len, self.lanes_of_all))
        self._number = 0
        self._calls: list[Callable[[], object]] = []

    @property
    def holders(self) -> list[int]:
        """The workers that have a lane in this round."""
        return [worker for worker, own in enumerate(self.lanes_of_all) if self._number < len(own)]

    def begin(self, number: int) -> None:
        """Start a round in which this worker has a lane; in the first one all have."""
        self._number = number
        if number == 0:
            self._calls = []

    def note(self, call: Callable[[], object]) -> None:
        """In the first round, keep how to take part in an exchange without a lane."""
        if self._number == 0:
            self._calls.append(call)

    def pass_over(self, number: int) -> None:
        """Take part in a round in which this worker has no lane."""
        self._number = number
        with torch.no_grad():
            for call in self._calls:
                call()

    def exchange(
        self, traffic: Traffic, leaving: Mapping[int, Tensor], arriving: Mapping[int, Tensor]
    ) -> dict[int, Tensor]:
        """Send a tensor to each of some workers, and get one, of the form given, from each of others.

        A worker's own goes from one to the other. A collective.
        """
        group, everyone, start = self.group, range(self.group.size), time.perf_counter()
        away = [leaving[w].reshape(-1) for w in everyone if w in leaving and w != group.rank]
        sent = [leaving[w].numel() if w in leaving and w != group.rank else 0 for w in everyone]
        received = [arriving[w].numel() if w in arriving and w != group.rank else 0 for w in everyone]
        like = next(iter([*leaving.values(), *arriving.values()]))
        flat, room = torch.cat(away) if away else like.new_empty(0), like.new_empty(sum(received))
        group.all_to_all(room, flat, received, sent)
        found, first = {}, 0
        for worker, form in arriving.items():
            if worker == group.rank:
                found[worker] = leaving[worker].contiguous()
                continue
            found[worker] = _aligned(room[first : first + form.numel()].view(form.shape))
            first += form.numel()
        traffic.num_bytes += flat.numel() * flat.element_size()
        traffic.seconds += time.perf_counter() - start
        return found


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor where a tensor of its own could begin."""
    return tensor if tensor.data_ptr() % _ALIGN == 0 else tensor.clone()
