"""A 2-D convolution in pieces: some output channels and rows, from the input rows that they need.

Every element of a piece is the whole sum that it is uncut. Only the weight's gradient is a sum over pixels,
made a band of rows at a time. Rows outside the image are zeros, written around the rows at hand. A piece of
the whole height is the stock call, but for `pointwise`. Who sends the rows is no matter of this file.

Windows belong to one side: a normal convolution's output, a transposed one's input. The other side needs the
halo. Dimensions are N C H W.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lockstep.errors import ModelError
from lockstep.parallel.split.layers.channel_segment import ChannelSegment, by_output, channel_segments
from lockstep.parallel.split.layers.pointwise import is_unsafe, under_windows
from lockstep.parallel.split.layers.row_buffer import (
    dense_as,
    empty_as,
    is_channels_last,
    place_rows,
    take_rows,
)
from lockstep.parallel.split.layers.window import Window

Pair = tuple[int, int]


@dataclass(frozen=True)
class ConvForm:
    """The numbers of a convolution, and its arithmetic by pieces.

    A range `held` says which rows of an image a tensor has: all that the method of needs names, or more.
    """

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int
    transposed: bool
    output_padding: Pair

    @classmethod
    def of(cls, layer: nn.Conv2d | nn.ConvTranspose2d) -> ConvForm:
        """The form of a layer; padding in words becomes numbers."""
        if layer.padding_mode != "zeros":
            raise ModelError(
                f"padding_mode '{layer.padding_mode}' of a convolution cannot be cut: only 'zeros' can"
            )
        kernel, dilation = _pair(layer.kernel_size), _pair(layer.dilation)
        padding: str | Sequence[int] = layer.padding
        if isinstance(padding, str):
            same = padding == "same"
            both = [same * (size - 1) * step for size, step in zip(kernel, dilation, strict=True)]
            if any(rows % 2 for rows in both):
                raise ModelError(
                    f"padding 'same' of a kernel {kernel} dilated by {dilation} cannot be cut: "
                    "it pads one side more than the other; choose an odd kernel"
                )
            padding = [rows // 2 for rows in both]
        transposed, more = isinstance(layer, nn.ConvTranspose2d), _pair(layer.output_padding)
        return cls(kernel, _pair(layer.stride), _pair(padding), dilation, layer.groups, transposed, more)

    @property
    def window(self) -> Window:
        """The row arithmetic."""
        return Window(self.kernel[0], self.stride[0], self.padding[0], self.dilation[0])

    def out_rows(self, rows: int) -> int:
        """The rows of the output, for an input of `rows` rows."""
        return self._out_size(rows, 0)

    def forward_needs(self, out: range, rows: int) -> range:
        """The rows of x, which has `rows` in all, that these output rows need; all for all."""
        if self._is_whole(range(rows), out):
            return range(rows)
        return self.window.touched(out, rows) if self.transposed else self.window.needs(out, rows)

    def forward(
        self, x: Tensor, held: range, weight: Tensor, bias: Tensor | None, out: range, outs: range
    ) -> Tensor:
        """Rows `out` of the output channels `outs`, from all channels of x."""
        call, at, made = self, held, out
        if not self._is_whole(held, out):
            call = self._between_rows()
            at = self.window.touched(out, held.stop) if self.transposed else self.window.frame(out)
            made = self.window.frame(at) if self.transposed else out
        shape = (len(x), len(outs), len(made), self._out_size(x.shape[3], 1))
        if 0 in shape:
            y = empty_as(shape, x)
        else:
            found = channel_segments(outs, self.group_sizes(weight.shape)[1])
            x = take_rows(x, held, at)
            y = _cat([call._forward(x, weight, bias, one) for one in found], 1)
        return place_rows(y, made, out, None if bias is None else bias[outs.start : outs.stop])

    def input_needs(self, rows: range, out_rows: int) -> range:
        """The rows of dy, which has `out_rows` in all, that these input rows' gradient needs; all for all."""
        if self._is_whole(rows, range(out_rows)):
            return range(out_rows)
        return self.window.needs(rows, out_rows) if self.transposed else self.window.touched(rows, out_rows)

    def input_gradient(
        self, dy: Tensor, held: range, weight: Tensor, rows: range, ins: Sequence[range], width: int
    ) -> Tensor:
        """Rows `rows` of the gradient of these input channels, from all output channels of dy."""
        call, at, made = self, held, rows
        if not self._is_whole(rows, held):
            call = self._between_rows()
            at = self.window.frame(rows) if self.transposed else self.window.touched(rows, held.stop)
            made = rows if self.transposed else self.window.frame(at)
        shape = (len(dy), sum(map(len, ins)), len(made), width)
        if 0 in shape:
            return place_rows(empty_as(shape, dy), made, rows, None)
        size = self.group_sizes(weight.shape)[0]
        dy = take_rows(dy, held, at)
        found = [one for own in ins if own for one in channel_segments(own, size)]
        parts = [call._input_gradient(dy, weight, one, (len(made), width)) for one in found]
        return place_rows(_cat(parts, 1), made, rows, None)

    def weight_needs(self, band: range, rows: int, out_rows: int) -> tuple[range, range]:
        """The rows of x and of dy that a band needs: of output rows, or a transposed one's input rows."""
        if len(band) == (rows if self.transposed else out_rows):
            return range(rows), range(out_rows)
        if self.transposed:
            return band, self.window.needs(band, out_rows)
        return self.window.needs(band, rows), band

    def weight_gradient(
        self,
        x: Tensor,
        x_held: range,
        dy: Tensor,
        dy_held: range,
        band: range,
        outs: range,
        weight_shape: Sequence[int],
    ) -> Tensor:
        """A band's share of the gradient of the weights that make `outs`; dy has these channels only.

        It has the form of the weight with fewer channels. Of a transposed convolution whose `outs` begin or
        end inside different groups, it is a group's inputs by `outs`. `join_weights` reads both.
        """
        inputs, outputs = self.group_sizes(weight_shape)
        call, x_at, dy_at = self, x_held, band
        if self.transposed:
            x_at, dy_at = band, dy_held
        if not self._is_whole(x_at, dy_at):
            call, frame = self._between_rows(), self.window.frame(band)
            x_at, dy_at = (band, frame) if self.transposed else (frame, band)
        x, dy = take_rows(x, x_held, x_at), take_rows(dy, dy_held, dy_at)
        as_weight = dy if is_channels_last(dy) else x  # with one channel, x does not tell
        whole = empty_as(tuple(weight_shape), as_weight).zero_()
        found, parts = channel_segments(outs, outputs), []
        for one in found:
            like = self.part(whole, one, True)
            own = dense_as(dy[:, one.own.start - outs.start : one.own.stop - outs.start], dy)
            part = call._weight_gradient(x, own, like, one) if band else like
            several = self.transposed and len(found) > 1
            parts.append(by_output(part, one.own, outputs) if several else part)
        if not parts:
            return whole[:inputs, :0] if self.transposed else whole[:0]
        return _cat(parts, int(self.transposed))

    def join_weights(self, parts: Sequence[Tensor], cuts: Sequence[range]) -> Tensor:
        """The whole gradient of the weight, from the parts of ranges that follow each other."""
        if not self.transposed:
            return _cat(parts, 0)
        outputs = cuts[-1].stop // self.groups
        rows = _cat([by_output(part, cut, outputs) for part, cut in zip(parts, cuts, strict=True)], 1)
        split = rows.reshape(len(rows), self.groups, outputs, *rows.shape[2:])
        return split.transpose(0, 1).flatten(0, 1)

    def _forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, one: ChannelSegment) -> Tensor:
        own = None if bias is None else bias[one.own.start : one.own.stop]
        inputs, _ = self.group_sizes(weight.shape)
        x, weight = dense_as(x[:, one.across(inputs)], x), self.part(weight, one, True)
        y: Tensor = torch.ops.aten.convolution(x, weight, own, *self.numbers(one))
        return y

    def _input_gradient(self, dy: Tensor, weight: Tensor, one: ChannelSegment, size: Pair) -> Tensor:
        _, outputs = self.group_sizes(weight.shape)
        dy, weight = dense_as(dy[:, one.across(outputs)], dy), self.part(weight, one, False)
        x = empty_as((len(dy), len(one.own), *size), dy)  # only its form is read
        return self._backward(dy, x, weight, one, 0)

    def _weight_gradient(self, x: Tensor, dy: Tensor, like: Tensor, one: ChannelSegment) -> Tensor:
        inputs = len(like) // len(one.groups) if self.transposed else like.shape[1]
        x, call = dense_as(x[:, one.across(inputs)], x), self
        is_pointwise = self.kernel == (1, 1) and self.padding == (0, 0) and len(one.groups) == 1
        if is_pointwise and is_unsafe(x, dy, self.stride):
            (x, dy), call = under_windows(x, dy), replace(self, stride=(1, 1), output_padding=(0, 0))
        return call._backward(dy, x, like, one, 1)

    def _backward(self, dy: Tensor, x: Tensor, weight: Tensor, one: ChannelSegment, which: int) -> Tensor:
        """The gradient of x, which is 0, or of the weight, 1."""
        numbers, mask = self.numbers(one), [which == 0, which == 1, False]
        grads: list[Tensor] = torch.ops.aten.convolution_backward(dy, x, weight, None, *numbers, mask)
        return grads[which]

    def numbers(self, one: ChannelSegment) -> tuple[Pair, Pair, Pair, bool, Pair, int]:
        """What both stock operations take after their tensors."""
        groups = len(one.groups)
        return self.stride, self.padding, self.dilation, self.transposed, self.output_padding, groups

    def part(self, weight: Tensor, one: ChannelSegment, of_output: bool) -> Tensor:
        """The weights of a segment of output or input channels, without gaps."""
        return dense_as(weight[self._box(one, weight.shape, of_output)], weight)

    def _box(self, one: ChannelSegment, shape: Sequence[int], of_output: bool) -> tuple[slice, slice]:
        """Where the weights of a segment lie, along the weight's first two dimensions."""
        inputs, outputs = self.group_sizes(shape)
        if of_output != self.transposed:  # the first dimension counts the segment's own channels
            return slice(one.own.start, one.own.stop), slice(None)
        own, other = (outputs, inputs) if of_output else (inputs, outputs)
        return one.across(other), one.within(own)

    def group_sizes(self, shape: Sequence[int]) -> Pair:
        """The input and the output channels of a group, by the shape of the whole weight."""
        first, second = shape[0] // self.groups, shape[1]
        return (first, second) if self.transposed else (second, first)

    def _is_whole(self, ins: range, outs: range) -> bool:
        """Whether these rows are a whole image and its whole output, by their numbers."""
        return ins.start == outs.start == 0 < len(ins) and len(outs) == self.out_rows(len(ins))

    def _between_rows(self) -> ConvForm:
        """The form of a call whose rows have their padding written around them."""
        return replace(self, padding=(0, self.padding[1]), output_padding=(0, self.output_padding[1]))

    def _out_size(self, size: int, dim: int) -> int:
        reach, stride = (self.kernel[dim] - 1) * self.dilation[dim] + 1, self.stride[dim]
        if self.transposed:
            return (size - 1) * stride - 2 * self.padding[dim] + reach + self.output_padding[dim]
        return (size + 2 * self.padding[dim] - reach) // stride + 1


def _pair(numbers: Sequence[int]) -> Pair:
    first, second = numbers
    return first, second


def _cat(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
