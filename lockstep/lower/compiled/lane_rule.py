"""Compiled model, what stands in for functions: modules that compute several lanes, put into a traced model.

Sums over samples or pixels are by lane or by sample, in an order of ours; all else stays what it was.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.kernels.stock.lane_function import Conv, lane_conv_transpose2d, pixel_mean
from lockstep.kernels.stock.row_function import expand_to, is_factor, lane_layer_norm, scale_channels
from lockstep.lower.compiled.compiled_layer import Sizes

Pair = Callable[..., Tensor]
# Functions and methods of two tensors, one of which may be spread over the other.
PAIRS: dict[Any, Pair] = {
    **{
        function: function
        for function in (
            operator.add, operator.sub, operator.mul, operator.truediv, operator.iadd, operator.isub,
            operator.imul, operator.itruediv, torch.add, torch.sub, torch.mul, torch.div,
        )
    },
    **{
        name: getattr(Tensor, name)
        for name in ("add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_", "multiply", "divide")
    },
}  # fmt: skip
_PRODUCTS = (operator.mul, torch.mul, Tensor.mul, Tensor.multiply)
_PIXELS = {(2, 3), (3, 2), (-2, -1), (-1, -2)}


class LanePair(nn.Module):
    """An operation of two operands; the smaller one is spread with a gradient that is summed by lane."""

    def __init__(self, function: Pair, sizes: Sizes) -> None:
        super().__init__()
        self.function, self.is_product = function, function in _PRODUCTS
        self._sizes = sizes.lane_size, sizes.total_lanes

    def forward(self, a: Any, b: Any, **options: Any) -> Any:
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape != b.shape:
            if self.is_product and is_factor(a, b):
                return scale_channels(a, b, self._sizes)
            if self.is_product and is_factor(b, a):
                return scale_channels(b, a, self._sizes)
            shape: torch.Size = torch.broadcast_shapes(a.shape, b.shape)  # type: ignore[no-untyped-call]
            a = a if a.shape == shape else expand_to(a, shape, self._sizes)
            b = b if b.shape == shape else expand_to(b, shape, self._sizes)
        return self.function(a, b, **options)


class LaneMean(nn.Module):
    """The mean over pixels [N, C, H, W] → [N, C, 1, 1], or [N, C]."""

    def __init__(self, keepdim: bool) -> None:
        super().__init__()
        self.keepdim = keepdim

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4:
            return x.mean((-2, -1), keepdim=self.keepdim)
        y = pixel_mean(x)
        return y[:, :, None, None] if self.keepdim else y


class LaneLayerNorm(nn.Module):
    """Layer norm over the last dimension."""

    def __init__(self, weight: Tensor, bias: Tensor, eps: float, sizes: Sizes) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = weight, bias, eps
        self._sizes = sizes.lane_size, sizes.total_lanes

    def forward(self, x: Tensor) -> Tensor:
        return lane_layer_norm(x, self.weight, self.bias, self.eps, self._sizes)


class LaneTransposed(nn.Module):
    """A transposed convolution, lane by lane."""

    def __init__(self, layer: nn.ConvTranspose2d, sizes: Sizes) -> None:
        super().__init__()
        self.weight, self.bias, self._dtype = layer.weight, layer.bias, sizes.dtype
        assert not isinstance(layer.padding, str)
        stride, padding, dilation = ((n[0], n[1]) for n in (layer.stride, layer.padding, layer.dilation))
        self._conv = Conv(stride, padding, dilation, layer.groups, sizes.lane_size, sizes.total_lanes)
        self._more = layer.output_padding

    def forward(self, x: Tensor) -> Tensor:
        conv, kernel = self._conv, self.weight.shape[2:]
        high, wide = (
            (x.shape[2 + i] - 1) * conv.stride[i] - 2 * conv.padding[i]
            + conv.dilation[i] * (kernel[i] - 1) + self._more[i] + 1
            for i in (0, 1)
        )  # fmt: skip
        return lane_conv_transpose2d(x.to(self._dtype), self.weight, self.bias, conv, (high, wide))


def is_over_pixels(dim: Any) -> bool:
    """Whether a `dim` names the pixels of an image."""
    return isinstance(dim, list | tuple) and tuple(dim) in _PIXELS
