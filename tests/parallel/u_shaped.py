"""Trains a module with every kind of layer that can be cut; arguments: plan, images, folder, device."""

import sys
from pathlib import Path

import torch
from torch import nn

import lockstep
from lockstep.kernels.lrn import LRN


class Down(nn.Sequential):
    """Convolutions of several kinds, each after the other."""

    def __init__(self, ins, outs, **options):
        super().__init__(nn.Conv2d(ins, outs, **options), nn.BatchNorm2d(outs), nn.ReLU(inplace=True))


class UShaped(nn.Module):
    """Down to few rows and up again, with skips, concatenation, groups, dilation, pools and response norm."""

    def __init__(self):
        super().__init__()
        self.stem = Down(3, 8, kernel_size=7, stride=2, padding=3, bias=False)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.grouped = Down(8, 12, kernel_size=5, padding=2, groups=2)
        self.dilated = nn.Conv2d(12, 8, 3, padding=2, dilation=2)
        self.depthwise = nn.Conv2d(8, 8, 3, padding="same", groups=8)
        self.norm, self.drop, self.average = LRN(5), nn.Dropout2d(0.2), nn.AvgPool2d(2)
        self.low = Down(8, 16, kernel_size=3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1)
        self.last_up = nn.ConvTranspose2d(16, 6, 3, stride=2, padding=1, output_padding=1)
        self.pixel_drop, self.head = nn.Dropout(0.1), nn.Linear(6, 5)
        self.side = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))

    def forward(self, x):
        x = self.pool(self.stem(x))
        x = self.dilated(self.grouped(x))
        x = self.drop(torch.relu(self.norm(x)) + self.depthwise(x))
        low = self.low(x)
        up = torch.cat([self.up(low), x], 1)
        up = self.pixel_drop(torch.tanh(self.last_up(up)))
        return self.head(self.average(up).mean((2, 3))) + self.side(low).view(x.size(0), -1)


class Images:
    """So many fixed images of 96 × 72 pixels, of five classes."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.rand(3, 96, 72, generator=torch.Generator().manual_seed(index)), index % 5


if __name__ == "__main__":
    torch.manual_seed(0)
    train = lockstep.Train(epochs=1, batch=8, lanes=4, clip=1.0, ema=0.9, bands=4, slices=4)
    plan, count, folder, device = [*sys.argv[1:], "cpu"][:4]
    launch = lockstep.Launch(name="run", runs_dir=Path(folder), device=device, plan=plan, quiet=True)
    lockstep.train(lockstep.Run(train=train), UShaped(), Images(int(count)), launch=launch)
