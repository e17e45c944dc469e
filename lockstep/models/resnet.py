"""Residual networks of 18, 34 and 50 layers (He et al., 2015; stride in the 3x3 convolution, "v1.5").

Built by registry.build. Shapes: N samples, C channels, H, W pixels.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from lockstep.kernels.global_average import GlobalAverage
from lockstep.models.block import BlockModel

Stem = Literal["auto", "imagenet", "cifar"]

_SMALL_SIDE = 96  # below it, the ImageNet stem's stride of 4 would leave the last blocks under 3x3 pixels


class Residual(nn.Module):
    """Adds what `main` computes to its input, which is projected where the shape changes."""

    expansion = 1

    def __init__(self, main: nn.Sequential, shortcut: nn.Module) -> None:
        super().__init__()
        self.main = main
        self.shortcut = shortcut
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.main(x) + self.shortcut(x))
        return out


class BasicBlock(Residual):
    """Two 3x3 convolutions."""

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        main = nn.Sequential(
            *_conv_norm(in_channels, width, 3, stride),
            nn.ReLU(inplace=True),
            *_conv_norm(width, width, 3),
        )
        super().__init__(main, _shortcut(in_channels, width, stride))


class Bottleneck(Residual):
    """A 3x3 convolution between two 1x1 that narrow and widen."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        out_channels = width * self.expansion
        main = nn.Sequential(
            *_conv_norm(in_channels, width, 1),
            nn.ReLU(inplace=True),
            *_conv_norm(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_conv_norm(width, out_channels, 1),
        )
        super().__init__(main, _shortcut(in_channels, out_channels, stride))


class ResNet(BlockModel):
    """A stem, four layers of residual blocks at 64, 128, 256 and 512 channels, and a classifier."""

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: tuple[int, int, int, int],
        stem: nn.Sequential,
        num_classes: int,
        *,
        zero_init_residual: bool,
    ) -> None:
        blocks: dict[str, nn.Module] = {"stem": stem}
        channels = 64
        for layer, depth in enumerate(depths):
            width = 64 << layer
            for index in range(depth):
                stride = 2 if layer > 0 and index == 0 else 1
                blocks[f"layer{layer + 1}_{index}"] = block(channels, width, stride)
                channels = width * block.expansion
        blocks["classifier"] = nn.Sequential(GlobalAverage(), nn.Linear(channels, num_classes))
        super().__init__(blocks)
        self._init(zero_init_residual)

    def _init(self, zero_init_residual: bool) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, Residual) and zero_init_residual:
                last_norm = module.main[-1]
                assert isinstance(last_norm, nn.BatchNorm2d)
                nn.init.zeros_(last_norm.weight)


def resnet18(
    in_channels: int,
    num_classes: int,
    image_size: tuple[int, int],
    *,
    stem: Stem = "auto",
    zero_init_residual: bool = False,
) -> ResNet:
    """Eight basic blocks."""
    first = _stem(in_channels, image_size, stem)
    return ResNet(BasicBlock, (2, 2, 2, 2), first, num_classes, zero_init_residual=zero_init_residual)


def resnet34(
    in_channels: int,
    num_classes: int,
    image_size: tuple[int, int],
    *,
    stem: Stem = "auto",
    zero_init_residual: bool = False,
) -> ResNet:
    """Sixteen basic blocks."""
    first = _stem(in_channels, image_size, stem)
    return ResNet(BasicBlock, (3, 4, 6, 3), first, num_classes, zero_init_residual=zero_init_residual)


def resnet50(
    in_channels: int,
    num_classes: int,
    image_size: tuple[int, int],
    *,
    stem: Stem = "auto",
    zero_init_residual: bool = False,
) -> ResNet:
    """Sixteen bottlenecks."""
    first = _stem(in_channels, image_size, stem)
    return ResNet(Bottleneck, (3, 4, 6, 3), first, num_classes, zero_init_residual=zero_init_residual)


def _stem(in_channels: int, image_size: tuple[int, int], stem: Stem) -> nn.Sequential:
    """7x7 at stride 2 and pooling, or for small images 3x3 at stride 1."""
    if stem == "cifar" or (stem == "auto" and min(image_size) < _SMALL_SIDE):
        return nn.Sequential(*_conv_norm(in_channels, 64, 3), nn.ReLU(inplace=True))
    layers = _conv_norm(in_channels, 64, 7, 2)
    return nn.Sequential(*layers, nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1))


def _conv_norm(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(out_channels)]


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(*_conv_norm(in_channels, out_channels, 1, stride))
