"""Networks with what timm's mobile ones have, written as timm writes it, which these tests do not need."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class NormAct(nn.BatchNorm2d):
    """A batch norm with its activation, which counts and normalizes in a forward of its own."""

    def __init__(self, channels: int, act: nn.Module) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), act

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.ndim == 4, f"expected an image (got {x.ndim}D)")
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        training = True if self.training else self.running_mean is None
        y = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, training, self.momentum or 0.0,
            self.eps,
        )  # fmt: skip
        found: Tensor = self.act(self.drop(y))
        return found


class ImageNorm(nn.LayerNorm):
    """Layer norm over an image's channels."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return y.permute(0, 3, 1, 2)


class Squeeze(nn.Module):
    """Squeeze and excite."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.narrow, self.act = nn.Conv2d(channels, 4, 1), nn.ReLU(inplace=True)
        self.widen, self.gate = nn.Conv2d(4, channels, 1), nn.Hardsigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.widen(self.act(self.narrow(x.mean((2, 3), keepdim=True)))))


class DropPath(nn.Module):
    """Stochastic depth, by the name and the settings that timm's has."""

    def __init__(self, drop_prob: float, scale_by_keep: bool = True) -> None:
        super().__init__()
        self.drop_prob, self.scale_by_keep = drop_prob, scale_by_keep

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        mask = x.new_empty((len(x), *[1] * (x.ndim - 1))).bernoulli_(1 - self.drop_prob)
        return x * mask.div_(1 - self.drop_prob)


class Inverted(nn.Module):
    """Widen, convolve each channel, squeeze, narrow."""

    def __init__(self, channels: int, stride: int, act: type[nn.Module], kernel: int = 3) -> None:
        super().__init__()
        self.skips = stride == 1
        self.wide, self.norm1 = nn.Conv2d(channels, 8, 1, bias=False), NormAct(8, act())
        self.deep = nn.Conv2d(8, 8, kernel, stride, kernel // 2, groups=8, bias=False)
        self.norm2, self.squeeze = NormAct(8, act()), Squeeze(8)
        self.narrow, self.norm3 = nn.Conv2d(8, channels, 1, bias=False), NormAct(channels, nn.Identity())
        self.path: nn.Module = DropPath(0.5) if self.skips else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm3(self.narrow(self.squeeze(self.norm2(self.deep(self.norm1(self.wide(x)))))))
        return self.path(y) + x if self.skips else y


class Next(nn.Module):
    """A block of ConvNeXt, by convolutions or by fully connected layers over channels."""

    def __init__(self, channels: int, by_rows: bool) -> None:
        super().__init__()
        self.deep, self.by_rows = nn.Conv2d(channels, channels, 5, padding=2, groups=channels), by_rows
        self.norm: nn.Module = nn.LayerNorm(channels) if by_rows else ImageNorm(channels)
        self.wide: nn.Module = nn.Linear(channels, 8) if by_rows else nn.Conv2d(channels, 8, 1)
        self.narrow: nn.Module = nn.Linear(8, channels) if by_rows else nn.Conv2d(8, channels, 1)
        self.gamma = nn.Parameter(torch.full((channels,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.deep(x)
        y = y.permute(0, 2, 3, 1) if self.by_rows else y
        y = self.narrow(F.gelu(self.wide(self.norm(y))))
        y = y.permute(0, 3, 1, 2) if self.by_rows else y
        return y.mul(self.gamma.reshape(1, -1, 1, 1)) + x


class Mobile(nn.Module):
    """All of it; an image of 3 channels to 10 classes.

    In lanes of 4 images of 12x12 pixels every layer has a multiple of 16 values: on a CPU, torch computes an
    activation's last ones, which do not fill a vector, in other bits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, 2, 1, bias=False), NormAct(8, nn.SiLU(inplace=True))
        self.blocks = nn.Sequential(
            Inverted(8, 1, nn.SiLU), Inverted(8, 2, nn.Hardswish, 5), Next(8, False), Next(8, True),
            nn.ConvTranspose2d(8, 8, 3, stride=2, padding=1, output_padding=1, groups=2),
        )  # fmt: skip
        self.pool, self.drop = nn.AdaptiveAvgPool2d(1), nn.Dropout(0.2)
        self.classifier = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.norm(self.stem(x)))
        found: Tensor = self.classifier(self.drop(self.pool(x).flatten(1)))
        return found


def mobile() -> Mobile:
    torch.manual_seed(0)
    return Mobile()
