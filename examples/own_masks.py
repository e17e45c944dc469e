"""Train a U-Net on masks: targets and outputs of any shape, with a loss and metrics of your own."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep


class Discs:
    """A bright disc in noise, and its mask."""

    def __init__(self, length: int, seed: int) -> None:
        self.length, self.seed = length, seed

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        y, x = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
        row, column = torch.randint(4, 12, (2,), generator=draw)
        mask = ((y - row) ** 2 + (x - column) ** 2 < 12).float()[None]
        return mask + 0.5 * torch.randn(1, 16, 16, generator=draw), mask


def block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up = block(1, 8), block(8, 16), block(24, 8)
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        x = F.interpolate(self.middle(F.max_pool2d(skip, 2)), scale_factor=2.0)
        return self.head(self.up(torch.cat([x, skip], 1)))


def iou(outputs: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    """Summed over all images, then divided."""
    found, there = outputs > 0, masks > 0.5
    return (found & there).sum(), (found | there).sum()


run = lockstep.Run(
    train=lockstep.Train(epochs=6, batch=64, lanes=4),
    optimizer=lockstep.Optimizer("adam", lr=0.01),
)
result = lockstep.train(
    run,
    model=UNet(),
    data=(Discs(512, seed=0), Discs(128, seed=1)),
    loss=F.binary_cross_entropy_with_logits,
    metrics={"iou": iou},
)
print(f"IoU {result.summary['metrics']['iou']:.3f}")
