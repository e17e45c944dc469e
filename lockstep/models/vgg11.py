"""VGG-11 (Simonyan and Zisserman, 2014, configuration A), without batch normalization.

Built by registry.build. Shapes: N samples, C channels, H, W pixels.
"""

from __future__ import annotations

from torch import nn

from lockstep.models.block import BlockModel, conv_relu, hidden, init_for_relu
from lockstep.models.option import Dropout

_WIDTHS = ((64,), (128,), (256, 256), (512, 512), (512, 512))


class VGG11(BlockModel):
    """Eight 3x3 convolutions in five blocks that each halve H and W, and three dense layers."""

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        image_size: tuple[int, int],
        *,
        dropout: Dropout = 0.5,
    ) -> None:
        blocks: dict[str, nn.Module] = {}
        channels = in_channels
        for number, widths in enumerate(_WIDTHS, start=1):
            blocks[f"block{number}"] = _block(channels, widths)
            channels = widths[-1]
        height, width = image_size
        blocks["hidden1"] = hidden(channels * (height // 32) * (width // 32), 4096, dropout)
        blocks["hidden2"] = hidden(4096, 4096, dropout)
        blocks["classifier"] = nn.Linear(4096, num_classes)
        super().__init__(blocks)
        init_for_relu(self)


def _block(in_channels: int, widths: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in widths:
        layers += conv_relu(in_channels, width, 3, padding=1)
        in_channels = width
    return nn.Sequential(*layers, nn.MaxPool2d(2))
