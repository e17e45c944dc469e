"""Global average pooling as a layer: the mean over all pixels of an image."""

from __future__ import annotations

from torch import Tensor, nn


class GlobalAverage(nn.Module):
    """[N, C, H, W] → [N, C]; torch's AdaptiveAvgPool2d has no deterministic backward on a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))
