"""Emotion48, a small network for emotions in 48x48 grey faces: three convolution blocks, one hidden layer.

Built by registry.build. Shapes: N samples, C channels, H, W pixels.
"""

from __future__ import annotations

from torch import nn

from lockstep.models.block import BlockModel, conv_relu, hidden
from lockstep.models.option import Dropout


class Emotion48(BlockModel):
    """Conv 3x3 with ReLU and 2x2 max pooling at 32, 64 and 128 filters, then 256 hidden units."""

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        image_size: tuple[int, int],
        *,
        dropout: Dropout = 0.0,
    ) -> None:
        height, width = image_size
        num_features = 128 * (height // 8) * (width // 8)
        super().__init__(
            {
                "block1": _block(in_channels, 32),
                "block2": _block(32, 64),
                "block3": _block(64, 128),
                "hidden": hidden(num_features, 256, dropout),
                "classifier": nn.Linear(256, num_classes),
            }
        )


def _block(in_channels: int, out_channels: int) -> nn.Sequential:
    """Halves H and W, dropping an odd last row or column."""
    return nn.Sequential(*conv_relu(in_channels, out_channels, 3, padding=1), nn.MaxPool2d(2))
