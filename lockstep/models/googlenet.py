"""GoogLeNet (Szegedy et al., 2014), without batch normalization and with both auxiliary heads.

Built by registry.build. Shapes: N samples, C channels, H, W pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lockstep.kernels.global_average import GlobalAverage
from lockstep.kernels.lrn import LRN
from lockstep.models.block import BlockModel, conv_relu, hidden, init_for_relu, out_side

_INCEPTIONS = {  # input channels; then filters: 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, pool projection
    "inception3a": (192, 64, 96, 128, 16, 32, 32),
    "inception3b": (256, 128, 128, 192, 32, 96, 64),
    "inception4a": (480, 192, 96, 208, 16, 48, 64),
    "inception4b": (512, 160, 112, 224, 24, 64, 64),
    "inception4c": (512, 128, 128, 256, 24, 64, 64),
    "inception4d": (512, 112, 144, 288, 32, 64, 64),
    "inception4e": (528, 256, 160, 320, 32, 128, 128),
    "inception5a": (832, 256, 160, 320, 32, 128, 128),
    "inception5b": (832, 384, 192, 384, 48, 128, 128),
}
_POOLED_BEFORE = {"inception4a": "pool3", "inception5a": "pool4"}
_AUX_CHANNELS = {"inception4a": 512, "inception4d": 528}
_INCEPTION_SIDE = 12  # the fewest pixels, along a side, that the first inception module may get


class Inception(nn.Module):
    """Four branches over the same input, concatenated along C."""

    def __init__(self, widths: tuple[int, int, int, int, int, int, int]) -> None:
        super().__init__()
        channels, one, three_in, three, five_in, five, pooled = widths
        self.branch1 = nn.Sequential(*conv_relu(channels, one, 1))
        self.branch3 = nn.Sequential(
            *conv_relu(channels, three_in, 1), *conv_relu(three_in, three, 3, padding=1)
        )
        self.branch5 = nn.Sequential(
            *conv_relu(channels, five_in, 1), *conv_relu(five_in, five, 5, padding=2)
        )
        self.branch_pool = nn.Sequential(
            nn.MaxPool2d(3, stride=1, padding=1), *conv_relu(channels, pooled, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.branch1(x), self.branch3(x), self.branch5(x), self.branch_pool(x)], 1)


class GoogLeNet(BlockModel):
    """Two stem blocks, nine inception modules and a classifier; `aux` hangs heads on two of them.

    With heads, the forward of training returns (logits, aux1, aux2); a loss adds the last two
    times `aux_weight`. That of evaluation returns logits.
    """

    aux_weight = 0.3

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        image_size: tuple[int, int],
        *,
        aux: bool = True,
    ) -> None:
        num_halvings = _stem_halvings(min(image_size))
        blocks: dict[str, nn.Module] = {"stem1": _stem1(in_channels, num_halvings), "stem2": _stem2()}
        for name, widths in _INCEPTIONS.items():
            if name in _POOLED_BEFORE:
                blocks[_POOLED_BEFORE[name]] = _pooling()
            blocks[name] = Inception(widths)
        blocks["classifier"] = nn.Sequential(GlobalAverage(), nn.Dropout(0.4), nn.Linear(1024, num_classes))
        super().__init__(blocks)
        height, width = (_aux_side(side, num_halvings) for side in image_size)
        heads = _AUX_CHANNELS if aux else {}
        self.aux = nn.ModuleDict(
            {name: _aux_head(channels, (height, width), num_classes) for name, channels in heads.items()}
        )
        init_for_relu(self)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        if not (self.training and self.aux):
            logits: Tensor = self.blocks(x)
            return logits
        side_logits = []
        for name, block in self.blocks.named_children():
            x = block(x)
            if name in self.aux:
                side_logits.append(self.aux[name](x))
        return (x, *side_logits)


def _stem_halvings(side: int) -> int:
    """How many of the stem's three halvings leave enough pixels; there is always at least one.

    Images of 96 pixels and more get all three. Smaller ones have stride 1 in the first convolution, and the
    smallest have no first pooling either. The parameters are the same.
    """
    return max(1, min(3, (side // _INCEPTION_SIDE).bit_length() - 1))


def _stem1(in_channels: int, num_halvings: int) -> nn.Sequential:
    layers = conv_relu(in_channels, 64, 7, stride=2 if num_halvings == 3 else 1, padding=3)
    if num_halvings >= 2:
        layers.append(_pooling())
    return nn.Sequential(*layers, LRN(5))


def _stem2() -> nn.Sequential:
    return nn.Sequential(*conv_relu(64, 64, 1), *conv_relu(64, 192, 3, padding=1), LRN(5), _pooling())


def _pooling() -> nn.MaxPool2d:
    """Rounds up, as the published net does: 112, 56, 28, 14, 7."""
    return nn.MaxPool2d(3, stride=2, ceil_mode=True)


def _aux_head(channels: int, size: tuple[int, int], num_classes: int) -> nn.Sequential:
    """5x5 average pooling at stride 3 (14x14 → 4x4), or over all of a smaller map."""
    kernel = (min(5, size[0]), min(5, size[1]))
    height, width = out_side(size[0], kernel[0], 3), out_side(size[1], kernel[1], 3)
    return nn.Sequential(
        nn.AvgPool2d(kernel, stride=3),
        *conv_relu(channels, 128, 1),
        hidden(128 * height * width, 1024, 0.7),
        nn.Linear(1024, num_classes),
    )


def _aux_side(side: int, num_halvings: int) -> int:
    """The side in pixels of the maps in inception4a to 4d, after the stem and one more pooling."""
    if num_halvings == 3:
        side = out_side(side, 7, 2, 3)
    num_poolings = min(num_halvings, 2) + 1
    for _ in range(num_poolings):
        side = -(-(side - 3) // 2) + 1
    return side
