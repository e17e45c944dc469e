"""What is convolved: sizes, and which of the three products of a layer is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ConvPass(StrEnum):
    """A layer computes one forward, and two gradients backward. N images, C channels, K filters."""

    FORWARD = "forward"  # images (N, C, H, W), weight (K, C / groups, R, R) → result (N, K, P, Q)
    DATA = "data gradient"  # gradient of the result, weight → gradient of the images
    WEIGHT = "weight gradient"  # images, gradient of the result → gradient of the weight


@dataclass(frozen=True)
class ConvShape:
    """A convolution with square filters, as torch's Conv2d means it."""

    batch: int
    in_channels: int
    out_channels: int
    height: int
    width: int
    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    groups: int = 1

    @property
    def image_size(self) -> tuple[int, int, int, int]:
        return self.batch, self.in_channels, self.height, self.width

    @property
    def weight_size(self) -> tuple[int, int, int, int]:
        return self.out_channels, self.in_channels // self.groups, self.kernel, self.kernel

    @property
    def result_size(self) -> tuple[int, int, int, int]:
        return self.batch, self.out_channels, self._after(self.height), self._after(self.width)

    @property
    def operations(self) -> int:
        """Multiplications and additions of the direct algorithm; alike for all three passes."""
        results = self.result_size[0] * self.result_size[1] * self.result_size[2] * self.result_size[3]
        return 2 * results * self.weight_size[1] * self.kernel**2

    def _after(self, size: int) -> int:
        return (size + 2 * self.padding - self.dilation * (self.kernel - 1) - 1) // self.stride + 1
