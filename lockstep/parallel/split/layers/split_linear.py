"""A fully connected layer over workers: each computes some outputs, and a partial sum of the data gradient.

The data gradient is a sum over outputs. It follows `train.slices`: each worker sums over its own slices, an
aligned subtree, and the tree over workers completes it. With one slice it is not cut this way: every worker
computes the gradient of its own inputs from all outputs' gradients and weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.lrn import widen
from lockstep.parallel.split.axes import CHANNEL, Axes, sum_leaves
from lockstep.parallel.split.spread import Spread, among_zeros, take


@dataclass
class LinearCut:
    """How one layer is dealt out; a probe may clear parts of `by_channel`."""

    axes: Axes
    given: Spread  # of the input [N, ins]
    made: Spread  # of the output [N, outs]
    ins: int
    outs: int
    by_channel: set[str] = field(default_factory=lambda: {"forward", "input", "weight"})
    by_slice: set[str] = field(default_factory=set)  # which of forward and weight are computed so

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        found: Tensor = _Multiply.apply(x, weight, bias, self)  # type: ignore[no-untyped-call]
        return found

    @property
    def is_sliced(self) -> bool:
        """Whether the data gradient follows slices of the outputs."""
        return 1 < self.axes.slices <= self.outs

    @property
    def own_outs(self) -> range:
        """This worker's outputs."""
        every = self.made.channels
        return every[self.axes.channel.rank][0] if every else range(self.outs)

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        """The gradient of this worker's part of the input."""
        axes, own = self.axes, self.own_outs
        if self.is_sliced:
            parts = [
                dy[:, s.start - own.start : s.stop - own.start] @ weight[s.start : s.stop]
                for s in axes.slices_in(own, self.outs)
            ]
            partial = sum_leaves([widen(part) for part in parts])
            total = (partial if not self.made.channels else _sum_over(axes, partial)).to(dy.dtype)
            return take(total, 1, self.given.channels[axes.channel.rank]) if self.given.channels else total
        every = axes.all_channels(dy, self.made)
        ins = self.given.channels[axes.channel.rank] if self.given.channels else (range(self.ins),)
        if "input" not in self.by_channel:
            return take(every @ weight, 1, ins)
        return every @ take(weight, 1, ins)

    def outputs(self, x: Tensor, weight: Tensor, bias: Tensor | None, outs: range) -> Tensor:
        """Some of the outputs."""
        found = [
            F.linear(x, weight[s.start : s.stop], None if bias is None else bias[s.start : s.stop])
            for s in self._pieces("forward", outs)
        ]
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def by_weight(self, x: Tensor, dy: Tensor, outs: range) -> Tensor:
        """The gradient of the weights of some outputs; `dy` has all, or these."""
        first = 0 if dy.shape[1] == self.outs else outs.start
        pieces = [slice(s.start - first, s.stop - first) for s in self._pieces("weight", outs)]
        found = [dy[:, piece].t() @ x for piece in pieces]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _pieces(self, part: str, outs: range) -> list[range]:
        return self.axes.slices_in(outs, self.outs) if part in self.by_slice else [outs]


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, cut: LinearCut) -> Tensor:
        every, own = cut.axes.all_channels(x, cut.given), cut.own_outs
        ctx.cut = cut
        ctx.save_for_backward(every, weight)
        outs = own if "forward" in cut.by_channel else range(cut.outs)
        half = [None if whole is None else whole.to(x.dtype) for whole in (weight, bias)]
        assert half[0] is not None
        made = cut.outputs(every, half[0], half[1], outs)
        return made if outs == own else made[:, own.start : own.stop].contiguous()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (x, weight), cut, own = ctx.saved_tensors, ctx.cut, ctx.cut.own_outs
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad = cut.input_gradient(dy, weight.to(dy.dtype)).contiguous() if needs_x else None
        weight_grad = bias_grad = None
        if needs_bias or "weight" not in cut.by_channel:
            every = cut.axes.all_channels(dy, cut.made)
        if needs_weight:
            outs = own if "weight" in cut.by_channel else range(cut.outs)
            found = cut.by_weight(x, dy if outs == own else every, outs)
            weight_grad = among_zeros(found, 0, outs, weight.shape)
        if needs_bias:  # a short sum, whose order may depend on how many there are side by side
            bias_grad = every.sum(0)
        sums = [None if part is None else part.to(weight.dtype) for part in (weight_grad, bias_grad)]
        return grad, sums[0], sums[1], None


def _sum_over(axes: Axes, partial: Tensor) -> Tensor:
    return axes.sum_large(CHANNEL, partial.reshape(-1), axes.slices).view(partial.shape)
