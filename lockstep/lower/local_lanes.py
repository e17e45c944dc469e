"""Runs a round's lanes one after another: each takes `train.local_steps` steps on weights of its own.

A lane begins with the run's weights and buffers, and leaves them as they were. What it gives is the sum of
its gradients over its steps, in the place of the gradient of one step; lane tree and optimizer are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lockstep.data.loader import Lanes
from lockstep.kernels.loss import WholeLoss
from lockstep.kernels.structure import zip_tensors
from lockstep.lower.lane_by_lane import LaneByLane, LaneOutput
from lockstep.lower.param_gradient import OnGradient
from lockstep.spec.param_group import ParamGroup


class LocalLanes(LaneByLane):
    """Runs the lanes of a round one after another with stock kernels."""

    _steps = 1
    _rates: Sequence[float] = ()

    def begin_round(self, steps: int, groups: Sequence[ParamGroup], rates: Sequence[float]) -> None:
        """How many steps each lane takes in the next round, and at which rate each group's parameters."""
        by_name = {name: rate for group, rate in zip(groups, rates, strict=True) for name in group.names}
        self._steps, self._rates = steps, [by_name[name] for name in self.params]

    def first_bad(self, lanes: Lanes, step: int) -> str | None:
        """Where a value is first not finite: of each lane in the order of its steps."""
        steps, self._steps = self._steps, 1
        for lane in range(lanes.num_lanes):
            batches = Lanes(*lanes.lane(lane), steps)
            with self._weights_kept():
                for number in range(steps):
                    one = Lanes(*batches.lane(number), 1, lanes.first + lane)
                    if found := super().first_bad(one, step + number):
                        return f"{found} in step {step + number}" if number else found
                    self._move(next(self.run(one, step + number)).grads)
        return None

    def _run_lane(
        self, images: Tensor, labels: Any, step: int, lane: int, early: OnGradient | None
    ) -> LaneOutput:
        """Walk through the lane's part of every batch of the round; `early` gets sums in the last step."""
        batches = Lanes(images, labels, self._steps)
        with self._weights_kept():
            total = super()._run_lane(*batches.lane(0), step, lane, early if self._steps == 1 else None)
            last, logits = total, [total.logits]
            for number in range(1, self._steps):
                self._move(last.grads)
                sums = _Sums(total.grads, early if number == self._steps - 1 else None)
                last = super()._run_lane(
                    *batches.lane(number), step + number, lane, sums.add if sums.early else None
                )
                sums.add_rest(last.grads)
                total.loss += last.loss
                logits.append(last.logits)
        seen = last.logits if isinstance(self.loss, WholeLoss) else torch.cat(logits)
        return replace(last, loss=total.loss / self._steps, logits=seen, grads=total.grads)

    @torch.no_grad()
    def _move(self, grads: Sequence[Tensor]) -> None:
        """A plain step of the weights of this lane."""
        moves = torch._foreach_mul(list(grads), list(self._rates))
        torch._foreach_sub_(list(self.params.values()), moves)

    @contextmanager
    def _weights_kept(self) -> Iterator[None]:
        """Give the parameters their values back at the end, whatever happens before."""
        params = [p.detach() for p in self.params.values()]
        before = [p.clone() for p in params]
        try:
            yield
        finally:
            torch._foreach_copy_(params, before)


class _Sums:
    """Adds the gradients of one more step to those of the steps before; gives each away if that is wanted."""

    def __init__(self, sums: Sequence[Tensor], early: OnGradient | None) -> None:
        self._sums, self.early = sums, early
        self._added: set[int] = set()

    def add(self, index: int, grad: Tensor) -> None:
        """Take one gradient as soon as it is known."""
        assert self.early
        self._added.add(index)
        self.early(index, self._sums[index].add_(grad))

    def add_rest(self, grads: Sequence[Tensor]) -> None:
        """Take all gradients but those that were taken already."""
        rest = [index for index in range(len(grads)) if index not in self._added]
        if rest:
            torch._foreach_add_([self._sums[i] for i in rest], [grads[i] for i in rest])


def join_round(batches: Sequence[Lanes]) -> Lanes:
    """The batches of a round as one: lane by lane, and of each lane its part of one batch after another."""
    first = batches[0]
    if len(batches) == 1:
        return first
    places = [slice(lane * first.lane_size, (lane + 1) * first.lane_size) for lane in range(first.num_lanes)]

    def join(tensors: list[Tensor]) -> Tensor:
        return torch.cat([tensor[place] for place in places for tensor in tensors])

    images, labels = zip_tensors(join, [(batch.images, batch.labels) for batch in batches])
    return replace(first, images=images, labels=labels, steps=len(batches))
