"""AlexNet (Krizhevsky et al., 2012): grouped convolutions, response normalization, overlapping pooling.

Built by registry.build. Shapes: N samples, C channels, H, W pixels.
"""

from __future__ import annotations

from torch import nn

from lockstep.kernels.lrn import LRN
from lockstep.models.block import BlockModel, conv_relu, hidden, init_for_relu, out_side
from lockstep.models.option import Dropout


class AlexNet(BlockModel):
    """Five convolutions, of which 2, 4 and 5 in two groups (the paper's two GPUs), and three dense layers."""

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        image_size: tuple[int, int],
        *,
        dropout: Dropout = 0.5,
    ) -> None:
        # The paper says 224 but its 55x55 maps need 227 without padding, or 224 with 2.
        padding = 0 if image_size == (227, 227) else 2
        height, width = (_last_side(side, padding) for side in image_size)
        conv1 = conv_relu(in_channels, 96, 11, stride=4, padding=padding)
        super().__init__(
            {
                "block1": nn.Sequential(*conv1, _normalization(), _pooling()),
                "block2": nn.Sequential(
                    *conv_relu(96, 256, 5, padding=2, groups=2), _normalization(), _pooling()
                ),
                "block3": nn.Sequential(*conv_relu(256, 384, 3, padding=1)),
                "block4": nn.Sequential(*conv_relu(384, 384, 3, padding=1, groups=2)),
                "block5": nn.Sequential(*conv_relu(384, 256, 3, padding=1, groups=2), _pooling()),
                "hidden1": hidden(256 * height * width, 4096, dropout),
                "hidden2": hidden(4096, 4096, dropout),
                "classifier": nn.Linear(4096, num_classes),
            }
        )
        init_for_relu(self)


def _normalization() -> LRN:
    """LRN with the paper's constants; its alpha of 1e-4 multiplies a sum, ours a mean over 5 channels."""
    return LRN(5, alpha=5e-4, beta=0.75, k=2.0)


def _pooling() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, stride=2)


def _last_side(side: int, padding: int) -> int:
    """The side in pixels after the first convolution and three poolings; the other convolutions keep it."""
    side = out_side(side, 11, 4, padding)
    for _ in range(3):
        side = out_side(side, 3, 2)
    return side
