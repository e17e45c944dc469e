"""Describes a fused layer: its form (convolution or linear, bias, ReLU, pooling or dropout) and its sizes.

A fully connected layer is a 1x1 convolution of a 1x1 image whose channels are its features.

Legend: N samples; H, W pixels of the input; OH, OW of the convolution; PH, PW of the layer's output;
CI, CO channels; KH, KW the kernel; K = KH · KW · CI. Images are stored as N H W C, with a border of zeros
for kernels that read past the edge, so that no load needs a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod


@dataclass(frozen=True)
class Layer:
    """The shapes of one fused layer, for one sample."""

    height: int
    width: int
    in_channels: int
    out_channels: int
    kernel: tuple[int, int] = (1, 1)
    pad: tuple[int, int] = (0, 0)
    pool: int = 1  # 2: 2x2 max pooling
    relu: bool = True
    dropout: float = 0.0
    stride: int = 1
    bias: bool = True
    name: str = field(default="", compare=False)  # of the module

    @property
    def conv_size(self) -> tuple[int, int]:
        """OH, OW."""
        (kh, kw), (ph, pw), stride = self.kernel, self.pad, self.stride
        return (self.height + 2 * ph - kh) // stride + 1, (self.width + 2 * pw - kw) // stride + 1

    @property
    def out_size(self) -> tuple[int, int]:
        """PH, PW."""
        height, width = self.conv_size
        return height // self.pool, width // self.pool

    @property
    def depth(self) -> int:
        """K: the number of products that one output sums."""
        return self.kernel[0] * self.kernel[1] * self.in_channels

    @property
    def in_shape(self) -> tuple[int, int, int]:
        """The shape of one sample's input with its border."""
        return self.height + 2 * self.pad[0], self.width + 2 * self.pad[1], self.in_channels

    @property
    def grad_border(self) -> tuple[int, int]:
        """The border of zeros around the gradient of the convolution's output, for the data gradient."""
        (kh, kw), (ph, pw), (oh, ow) = self.kernel, self.pad, self.conv_size
        return self._reach(self.height, kh, ph, oh), self._reach(self.width, kw, pw, ow)

    def _reach(self, side: int, kernel: int, pad: int, out_side: int) -> int:
        """How far past an edge of that gradient the data gradient of an input pixel reads."""
        ends = {*range(min(side, self.stride)), *range(max(side - self.stride, 0), side)}
        taps = [y + pad - k for y in ends for k in range(kernel)]
        reached = [tap // self.stride for tap in taps if tap % self.stride == 0]
        past: list[int] = [max(-place, place - out_side + 1) for place in reached]
        return max(0, *past) if past else 0

    @property
    def grad_shape(self) -> tuple[int, int, int]:
        """The shape of one sample's gradient of the convolution's output, with its border."""
        (height, width), (bh, bw) = self.conv_size, self.grad_border
        return height + 2 * bh, width + 2 * bw, self.out_channels

    def place_in(self, shape: Sequence[int]) -> tuple[int, int, int, int]:
        """Height and width of images of this shape, with any border, and where this layer reads first."""
        _, high, wide, _ = shape
        top, left = (high - self.height) // 2 - self.pad[0], (wide - self.width) // 2 - self.pad[1]
        assert top >= 0 and left >= 0, "the border is too narrow"
        return high, wide, top, left

    def border_in(self, shape: Sequence[int]) -> tuple[int, int]:
        """The border around the convolution's output [N, OH, OW, CO] in a tensor of this shape."""
        height, width = self.conv_size
        return (shape[1] - height) // 2, (shape[2] - width) // 2

    @property
    def is_plain(self) -> bool:
        """Whether the layer is a convolution and nothing else."""
        return not (self.bias or self.relu or self.pool > 1 or self.dropout)

    @property
    def num_values(self) -> int:
        """Values of one sample in the largest buffer of the layer; kernels index them with 32 bits."""
        return max(prod(self.in_shape), prod(self.grad_shape))

    @property
    def out_shape(self) -> tuple[int, int, int]:
        """The shape of one sample's output without a border."""
        return *self.out_size, self.out_channels
