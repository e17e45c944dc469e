"""A convolution over workers: each computes some output channels and some rows, forward and backward.

Forward, a worker gathers the input's channels and the halo's rows. Backward, it gathers the output gradient's
channels and halo, and computes the input's gradient where its own part of the input is. The weight's gradient
is a sum over pixels: a partial sum over this worker's bands, for its own output channels and zero for others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.lrn import widen
from lockstep.parallel.split.axes import SPATIAL, Axes, among_zeros, sum_leaves, take
from lockstep.parallel.split.layers.conv_piece import ConvForm
from lockstep.parallel.split.layers.whole_sums import whole_sums
from lockstep.parallel.split.layers.window import common_rows
from lockstep.parallel.split.spread import Spread, count


@dataclass
class ConvCut:
    """How one convolution is dealt out: fixed for a run, except `by_channel`, which a probe may clear."""

    axes: Axes
    form: ConvForm
    given: Spread  # of the input
    made: Spread  # of the output
    rows: int  # of the input, and of the output
    out_rows: int
    ins: int  # channels of the input, and of the output
    outs: int
    # which of forward, input and weight are computed for this worker's channels only; others for all
    by_channel: set[str] = field(default_factory=lambda: {"forward", "input", "weight", "bias"})
    by_band: set[str] = field(default_factory=set)  # which of forward and input are computed band by band

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        found: Tensor = _Convolve.apply(x, weight, bias, self)  # type: ignore[no-untyped-call]
        return found

    @property
    def is_banded(self) -> bool:
        """Whether rows are in bands."""
        return bool(self.made.rows)

    @property
    def own_outs(self) -> range:
        """This worker's output channels."""
        channels = self.made.channels
        return channels[self.axes.channel.rank][0] if channels else range(self.outs)

    def ranges(self, rows: int) -> tuple[range, list[range]]:
        """This worker's rows of an image of so many, and those of each of its bands."""
        if not self.is_banded:
            return range(rows), [range(rows)]
        return self.axes.own_rows(rows), self.axes.own_bands(rows)

    def fetch(self, x: Tensor, rows: int, needs: Callable[[range], range]) -> tuple[Tensor, range]:
        """The rows that this worker's part of another image needs, from all workers' rows of this one."""
        if not self.is_banded:
            return x, range(rows)
        have = self.axes.rows_of_all(rows)
        other = self.out_rows if rows == self.rows else self.rows
        want = [(needs(own),) for (own,) in self.axes.rows_of_all(other)]
        return self.axes.move(SPATIAL, x, 2, have, want), want[self.axes.spatial.rank][0]

    def forward_needs(self, out: range) -> range:
        """Rows of the input, for rows of the output; whoever is alone needs no copy without unused rows."""
        alone = self.axes.spatial.size == 1
        return range(self.rows) if alone else self.form.forward_needs(out, self.rows)

    def input_needs(self, rows: range) -> range:
        """Rows of the output's gradient, for rows of the input's."""
        alone = self.axes.spatial.size == 1
        return range(self.out_rows) if alone else self.form.input_needs(rows, self.out_rows)

    def forward(self, x: Tensor, held: range, weight: Tensor, bias: Tensor | None) -> Tensor:
        """This worker's part of the output."""
        whole, bands = self.ranges(self.out_rows)
        own = self.own_outs
        outs = own if "forward" in self.by_channel else range(self.outs)
        pieces = bands if "forward" in self.by_band else [whole]
        made = _join([self.form.forward(x, held, weight, bias, piece, outs) for piece in pieces])
        return made if outs == own else made.narrow(1, own.start, len(own)).contiguous()

    def input_gradient(self, dy: Tensor, held: range, weight: Tensor, width: int) -> Tensor:
        """The gradient of this worker's part of the input."""
        whole, bands = self.ranges(self.rows)
        axes, given = self.axes, self.given.channels
        own = given[axes.channel.rank] if given else (range(self.ins),)
        ins = (
            own
            if given
            else ((axes.channels_of_all(self.ins) or [own] * axes.channel.size)[axes.channel.rank])
        )
        cut = "input" in self.by_channel and bool(self.made.channels)
        ins = ins if cut else (range(self.ins),)
        pieces = bands if "input" in self.by_band else [whole]
        found = _join([self.form.input_gradient(dy, held, weight, piece, ins, width) for piece in pieces])
        if ins == own:
            return found
        if count(ins) == self.ins:
            return take(found, 1, own).contiguous()
        every = axes.channels_of_all(self.ins)
        return axes.all_channels(found, Spread(channels=every))

    def weight_gradient(
        self, x: Tensor, x_held: range, dy: Tensor, dy_held: range, shape: torch.Size
    ) -> Tensor:
        """The sum over this worker's bands; zero for output channels of others. `dy` has all, or its own."""
        own = self._channels("weight")
        _, bands = self.ranges(self.rows if self.form.transposed else self.out_rows)
        dy = _channels(dy, own)
        parts = [widen(self.form.weight_gradient(x, x_held, dy, dy_held, b, own, shape)) for b in bands]
        return among_zeros(sum_leaves(parts), 1 if self.form.transposed else 0, own, shape)

    def bias_gradient(self, dy: Tensor) -> Tensor:
        """The same for the bias, from this worker's rows of the output's gradient."""
        own = self._channels("bias")
        rows, bands = self.ranges(self.out_rows)
        dy = _channels(dy, own)
        sums = [widen(dy.narrow(2, b.start - rows.start, len(b)).sum((0, 2, 3))) for b in bands]
        return among_zeros(sum_leaves(sums), 0, own, torch.Size([self.outs]))

    def whole_gradients(self, x: Tensor, dy: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Both, without bands."""
        outs = self._channels("weight" if self._channels("bias") == self._channels("weight") else "")
        weight, bias = whole_sums(self.form, x, _channels(dy, outs), outs, shape, True)
        assert bias is not None
        return (
            among_zeros(weight, 1 if self.form.transposed else 0, outs, shape),
            among_zeros(bias, 0, outs, torch.Size([self.outs])),
        )

    def _channels(self, part: str) -> range:
        """The output channels for which this worker computes a part."""
        return self.own_outs if part in self.by_channel else range(self.outs)


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, cut: ConvCut) -> Tensor:
        every = cut.axes.all_channels(x, cut.given)
        held, need = cut.fetch(every, cut.rows, cut.forward_needs)
        half = [None if whole is None else whole.to(x.dtype) for whole in (weight, bias)]
        assert half[0] is not None
        out = cut.forward(held, need, half[0], half[1])
        own, _ = cut.ranges(cut.rows)
        before, after = (
            common_rows(need, range(min(own.start, need.start), own.start)),
            common_rows(need, range(own.stop, max(own.stop, need.stop))),
        )
        halos = [_rows(held, need, halo).clone() for halo in (before, after)]
        ctx.cut, ctx.need = cut, need
        # not the rows with their halo: the layer before keeps its output anyhow
        ctx.save_for_backward(every, weight, *halos)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        cut: ConvCut = ctx.cut
        x, weight, before, after = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        dy = dy if _is_dense(dy) else dy.contiguous()
        is_transposed, grad, weight_grad = cut.form.transposed, None, None
        all_dy = dy  # in all channels, if anything needs them
        if needs_x or is_transposed or not {"weight", "bias"} <= cut.by_channel:
            all_dy = cut.axes.all_channels(dy, cut.made)
        if needs_x or is_transposed:
            far, far_held = cut.fetch(all_dy, cut.out_rows, cut.input_needs)
        if needs_x:
            grad = cut.input_gradient(far, far_held, weight.to(x.dtype), x.shape[3])
        if needs_weight:
            own, inner = cut.ranges(cut.rows)[0], common_rows(ctx.need, cut.ranges(cut.rows)[0])
            parts = [part for part in (before, _rows(x, own, inner), after) if part.shape[2]]
            held = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
            if needs_bias and not cut.is_banded:
                first, second = cut.whole_gradients(held, all_dy, weight.shape)
                return grad, first.to(weight.dtype), second.to(weight.dtype), None
            source = (far, far_held) if is_transposed else (all_dy, cut.ranges(cut.out_rows)[0])
            weight_grad = cut.weight_gradient(held, ctx.need, *source, weight.shape).to(weight.dtype)
        return grad, weight_grad, cut.bias_gradient(all_dy) if needs_bias else None, None


def _rows(x: Tensor, held: range, wanted: range) -> Tensor:
    """Some of the rows that a tensor holds."""
    return x.narrow(2, wanted.start - held.start if wanted else 0, len(wanted))


def _channels(dy: Tensor, own: range) -> Tensor:
    """Some channels of a tensor that has all, or these."""
    return dy if dy.shape[1] == len(own) else dy.narrow(1, own.start, len(own))


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 2)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or (
        tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    )
