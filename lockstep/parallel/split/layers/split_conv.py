"""A convolution over workers: each computes some output channels and some rows, forward and backward.

Forward, a worker gathers the input's channels and the halo's rows. Backward, it gathers the output gradient's
channels and halo, and computes the input's gradient where its own part of the input is. The weight's gradient
is a sum over pixels: a partial sum over this worker's bands, for its own output channels and zero for others.
Of a grouped convolution whose groups are each one worker's, no channel is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lockstep.comm.group import Group
from lockstep.kernels.lrn import widen
from lockstep.parallel.split.axes import Axes, sum_leaves
from lockstep.parallel.split.layers.conv_piece import ConvForm
from lockstep.parallel.split.layers.halo import Halo
from lockstep.parallel.split.layers.row_buffer import RowParts
from lockstep.parallel.split.layers.whole_sums import whole_sums
from lockstep.parallel.split.spread import Spread, among_zeros, count, take


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
    by_slice: set[str] = field(default_factory=set)  # which of them, or of weight, by slices of channels
    # of which of them the inner rows are computed while the halo travels; a probe may clear this, too
    inner_first: set[str] = field(default_factory=lambda: {"forward", "input"})

    def __post_init__(self) -> None:
        self.inner_first &= self.inner_first if self.is_banded and self.axes.spatial.size > 1 else set()

    @property
    def own_groups(self) -> range:
        """This worker's groups, if every worker has the channels of its own: these need nothing of others."""
        groups, ins, outs = self.form.groups, self.given.channels, self.made.channels
        found, is_even = [], not any(n % self.axes.slices for n in (self.ins, self.outs))
        if self.by_slice and not is_even:  # the slices of its groups would be others
            return range(0)
        for given, (made,) in zip(ins, outs, strict=False):
            own = range(made.start * groups // self.outs, made.stop * groups // self.outs)
            sides = [range(own.start * n // groups, own.stop * n // groups) for n in (self.ins, self.outs)]
            found.append(own if (given, made) == ((sides[0],), sides[1]) else range(0))
        return found[self.axes.channel.rank] if all(found) and found else range(0)

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

    @property
    def forward_halo(self) -> Halo:
        """The output's rows from the input's."""
        form, (ins, outs) = self.form, (self.rows, self.out_rows)
        return self._halo(ins, outs, lambda out: form.forward_needs(out, ins), not form.transposed)

    @property
    def input_halo(self) -> Halo:
        """The rows of the input's gradient from those of the output's."""
        form, (ins, outs) = self.form, (self.rows, self.out_rows)
        return self._halo(outs, ins, lambda rows: form.input_needs(rows, outs), form.transposed)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, RowParts]:
        """This worker's part of the output, and the rows of the input that it had."""
        own = self.own_outs
        outs = own if "forward" in self.by_channel else range(self.outs)

        def compute(x: Tensor, held: range, out: range) -> Tensor:
            pieces = self._pieces("forward", outs, self.outs)
            return _cat([self.form.forward(x, held, weight, bias, out, piece) for piece in pieces], 1)

        if self.is_banded:
            made, parts = self.forward_halo.make(x, compute, *self._how("forward", self.out_rows))
        else:
            every = range(self.rows)
            made, parts = compute(x, every, range(self.out_rows)), RowParts([every], [x])
        return made if outs == own else made.narrow(1, own.start, len(own)).contiguous(), parts

    def input_gradient(
        self, dy: Tensor, weight: Tensor, width: int, meanwhile: Callable[[], None] | None
    ) -> tuple[Tensor, RowParts]:
        """The gradient of this worker's part of the input, and the rows of the output's that it had."""
        axes, given, rank = self.axes, self.given.channels, self.axes.channel.rank
        own, is_sliced = given[rank] if given else (range(self.ins),), "input" in self.by_slice
        every = axes.channels_of_all(self.ins) if is_sliced or not given else given
        is_cut = "input" in self.by_channel and self.made.channels and every
        ins = every[rank] if is_cut else (range(self.ins),)
        pieces = [(piece,) for piece in axes.slices_in(ins[0], self.ins)] if is_sliced else [ins]

        def compute(dy: Tensor, held: range, rows: range) -> Tensor:
            found = [self.form.input_gradient(dy, held, weight, rows, piece, width) for piece in pieces]
            return _cat(found, 1)

        if self.is_banded:
            how = self._how("input", self.rows)
            found, parts = self.input_halo.make(dy, compute, *how, meanwhile)
        else:
            all_rows = range(self.out_rows)
            found, parts = compute(dy, all_rows, range(self.rows)), RowParts([all_rows], [dy])
        if ins != own and count(ins) < self.ins:
            found = axes.all_channels(found, Spread(channels=every))
        return found if count(own) == found.shape[1] else take(found, 1, own).contiguous(), parts

    def weight_gradient(self, x: RowParts, dy: RowParts, shape: torch.Size) -> Tensor:
        """The sum over this worker's bands; zero for output channels of others. `dy` has all, or its own."""
        own, dim = self._channels("weight"), int(self.form.transposed)
        pieces = self._pieces("weight", own, self.outs)
        found = [self._by_weight(x, _of_channels(dy, own, piece), piece, shape) for piece in pieces]
        return among_zeros(_cat(found, dim), dim, own, shape)

    def _by_weight(self, x: RowParts, dy: RowParts, own: range, shape: torch.Size) -> Tensor:
        """The same for some output channels, which are those of `dy`."""
        is_transposed, parts = self.form.transposed, []
        _, bands = self.ranges(self.rows if is_transposed else self.out_rows)
        for band in bands:
            frame = self.form.window.frame(band)
            ranges = (band, frame) if is_transposed else (frame, band)
            if not self.is_banded:
                ranges = range(self.rows), range(self.out_rows)
            near, far = x.take(ranges[0]), dy.take(ranges[1])
            found = self.form.weight_gradient(near, ranges[0], far, ranges[1], band, own, shape)
            parts.append(widen(found))
        return sum_leaves(parts)

    def bias_gradient(self, dy: Tensor) -> Tensor:
        """The same for the bias, from this worker's rows of the output's gradient."""
        own = self._channels("bias")
        rows, bands = self.ranges(self.out_rows)
        dy = _channels(dy, own)
        sums = [widen(dy.narrow(2, b.start - rows.start, len(b)).sum((0, 2, 3))) for b in bands]
        return among_zeros(sum_leaves(sums), 0, own, torch.Size([self.outs]))

    def sums(
        self, x: RowParts, near: RowParts, dy: Tensor, weight: Tensor, needs_weight: bool, needs_bias: bool
    ) -> list[Tensor | None]:
        """The gradients of weight and bias; `near` has the rows of dy that the weight's needs."""
        if needs_weight and needs_bias and not self.is_banded and "weight" not in self.by_slice:
            outs = self._channels("weight" if self._channels("bias") == self._channels("weight") else "")
            every = x.take(range(self.rows)), _channels(dy, outs)
            first, second = whole_sums(self.form, *every, outs, weight.shape, True)
            assert second is not None
            first = among_zeros(first, 1 if self.form.transposed else 0, outs, weight.shape)
            second = among_zeros(second, 0, outs, torch.Size([self.outs]))
            return [first.to(weight.dtype), second.to(weight.dtype)]
        return [
            self.weight_gradient(x, near, weight.shape).to(weight.dtype) if needs_weight else None,
            self.bias_gradient(dy) if needs_bias else None,
        ]

    def of_groups(self, groups: range) -> ConvCut:
        """The convolution of some groups alone."""
        form, all_groups = replace(self.form, groups=len(groups)), self.form.groups
        given, made = Spread(self.given.rows), Spread(self.made.rows)
        ins, outs = (n * len(groups) // all_groups for n in (self.ins, self.outs))
        slices = len(self.axes.slices_in(self.own_outs, self.outs))
        axes = replace(self.axes, channel=Group(), slices=slices)
        return replace(self, axes=axes, form=form, given=given, made=made, ins=ins, outs=outs)

    def _halo(self, rows: int, made: int, needs: Callable[[range], range], is_framed: bool) -> Halo:
        """Rows of one side from the other's; a frame has rows outside the image, too."""
        own, across = self.ranges(self.out_rows)[0], self.ranges(self.rows)[0]
        if self.form.transposed:
            own, across = across, own
        is_like = across.start == own.start * self.form.stride[0]
        ins, outs = (own, across) if self.form.transposed else (across, own)
        is_like = is_like and self.form.out_rows(len(ins)) == len(outs)
        return Halo(self.axes, rows, made, needs, self.form.window.frame if is_framed else needs, is_like)

    def _how(self, part: str, rows: int) -> tuple[list[range], bool]:
        """The pieces of a part of the work, and whether its inner rows come first."""
        whole, bands = self.ranges(rows)
        return (bands, False) if part in self.by_band else ([whole], part in self.inner_first)

    @property
    def is_sliced(self) -> bool:
        """Whether it can be computed by slices of channels."""
        return not (self.form.transposed and self.form.groups > 1) and self.axes.slices > 1

    def _pieces(self, part: str, own: range, channels: int) -> list[range]:
        """Some channels at once, or slice by slice."""
        return self.axes.slices_in(own, channels) if part in self.by_slice else [own]

    def _channels(self, part: str) -> range:
        """The output channels for which this worker computes a part."""
        return self.own_outs if part in self.by_channel else range(self.outs)


def _channels(dy: Tensor, own: range) -> Tensor:
    """Some channels of a tensor that has all, or these."""
    return dy if dy.shape[1] == len(own) else dy.narrow(1, own.start, len(own))


def _of_channels(dy: RowParts, own: range, some: range) -> RowParts:
    """Some of a worker's channels of rows that have all channels, or its own."""
    firsts = [0 if len(own) < tensor.shape[1] else own.start for tensor in dy.tensors]
    pairs = zip(dy.tensors, firsts, strict=True)
    found = [tensor.narrow(1, some.start - first, len(some)) for tensor, first in pairs]
    return RowParts(dy.ranges, found)


def _cat(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
