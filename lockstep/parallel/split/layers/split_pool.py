"""Pooling over rows of several workers: windows reach into the rows of others, forward and backward.

The gradient of an input row sums over all windows above it, in the order of the uncut pool. So each worker
gets the output gradients of these windows and, for a maximum, the rows under them, to find it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.parallel.split.axes import SPATIAL, Axes
from lockstep.parallel.split.layers.window import Window, common_rows
from lockstep.parallel.split.spread import Spread

Pair = tuple[int, int]
_aten = torch.ops.aten


@dataclass(frozen=True)
class PoolForm:
    """The numbers of a pool."""

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    is_max: bool

    @classmethod
    def of(cls, layer: nn.MaxPool2d | nn.AvgPool2d) -> PoolForm | None:
        """The form of a layer; None for one whose divisor or last window depends on the place."""
        is_max = isinstance(layer, nn.MaxPool2d)
        kernel, padding = _two(layer.kernel_size), _two(layer.padding)
        stride = _two(layer.stride)
        if isinstance(layer, nn.MaxPool2d):
            return (
                None if layer.return_indices else cls(kernel, stride, padding, _two(layer.dilation), is_max)
            )
        plain = not layer.ceil_mode and layer.divisor_override is None
        plain = plain and (layer.count_include_pad or padding == (0, 0))
        return cls(kernel, stride, padding, (1, 1), is_max) if plain else None

    @property
    def window(self) -> Window:
        """The row arithmetic."""
        return Window(self.kernel[0], self.stride[0], self.padding[0], self.dilation[0])

    def forward(self, frame: Tensor, columns: int) -> Tensor:
        """The pool of rows that lie under whole windows."""
        if self.is_max:
            found: Tensor = _aten.max_pool2d_with_indices(*self._max_args(frame, columns))[0]
            return found
        found = _aten.avg_pool2d(frame, *self._average_args())
        return found

    def backward(self, dy: Tensor, frame: Tensor, columns: int) -> Tensor:
        """The gradient of these rows."""
        if not self.is_max:
            found: Tensor = _aten.avg_pool2d_backward(dy, frame, *self._average_args())
            return found
        args = self._max_args(frame, columns)
        indices = _aten.max_pool2d_with_indices(*args)[1]
        found = _aten.max_pool2d_with_indices_backward(dy, *args, indices)
        return found

    def _max_args(self, frame: Tensor, columns: int) -> tuple[Any, ...]:
        plain = (frame.shape[3] + 2 * self.padding[1] - self._reach) // self.stride[1] + 1
        rounds_up = columns > plain
        return frame, self.kernel, self.stride, (0, self.padding[1]), self.dilation, rounds_up

    def _average_args(self) -> tuple[Any, ...]:
        divisor = self.kernel[0] * self.kernel[1]
        return self.kernel, self.stride, (0, self.padding[1]), False, True, divisor

    @property
    def _reach(self) -> int:
        return (self.kernel[1] - 1) * self.dilation[1] + 1


@dataclass
class PoolCut:
    """A pool whose input's and output's rows are in bands."""

    axes: Axes
    form: PoolForm
    given: Spread
    made: Spread
    columns: int  # of the output

    def __call__(self, x: Tensor) -> Tensor:
        found: Tensor = _Pool.apply(x, self)  # type: ignore[no-untyped-call]
        return found

    def fetch(self, x: Tensor, outs: list[range]) -> tuple[Tensor, range]:
        """The input's rows under the windows of every worker's `outs`; those outside are never chosen."""
        rows, window, rank = self.given.rows, self.form.window, self.axes.spatial.rank
        have = self.axes.rows_of_all(rows)
        needs = [window.needs(out, rows) for out in outs]
        held = self.axes.move(SPATIAL, x, 2, have, [(need,) for need in needs])
        frame, need = window.frame(outs[rank]), needs[rank]
        if frame == need:
            return held, frame
        shape = [*x.shape[:2], len(frame), x.shape[3]]
        padded = x.new_full(shape, float("-inf") if self.form.is_max else 0.0)
        padded.narrow(2, need.start - frame.start, len(need)).copy_(held)
        return padded, frame

    @property
    def own_outs(self) -> list[range]:
        """The output's rows of every worker."""
        return [own for (own,) in self.axes.rows_of_all(self.made.rows)]

    @property
    def touched(self) -> list[range]:
        """The output's rows whose windows touch every worker's rows of the input."""
        every = self.axes.rows_of_all(self.given.rows)
        return [self.form.window.touched(own, self.made.rows) for (own,) in every]


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: PoolCut) -> Tensor:
        ctx.cut = cut
        ctx.save_for_backward(x)
        frame, _ = cut.fetch(x, cut.own_outs)
        return cut.form.forward(frame, cut.columns)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,), cut = ctx.saved_tensors, ctx.cut
        touched, axes = cut.touched, cut.axes
        frame, rows = cut.fetch(x, touched)
        have = axes.rows_of_all(cut.made.rows)
        near = axes.move(SPATIAL, dy.contiguous(), 2, have, [(outs,) for outs in touched])
        found = cut.form.backward(near, frame, cut.columns)
        own = axes.own_rows(cut.given.rows)
        inside = common_rows(rows, own)
        if inside == own:
            return found.narrow(2, own.start - rows.start, len(own)).contiguous(), None
        grad = torch.zeros_like(x)  # rows that no window touches
        part = found.narrow(2, inside.start - rows.start, len(inside))
        grad.narrow(2, inside.start - own.start, len(inside)).copy_(part)
        return grad, None


def _two(value: Any) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[1])
