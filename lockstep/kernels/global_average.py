"""GlobalAverage: the mean over an image's pixels, as a layer with a deterministic gradient."""

from __future__ import annotations

from torch import Tensor, nn


class GlobalAverage(nn.Module):
    """[N, C, H, W] → [N, C]; torch's AdaptiveAvgPool2d has no deterministic backward on a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))
