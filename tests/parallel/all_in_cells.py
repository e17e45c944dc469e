"""Trains a module as if no kernel kept its bits in parts; arguments: plan, bands, folder."""

import sys
from pathlib import Path

import torch
from torch import nn

import lockstep
from lockstep.parallel.split.probes import cell_probe


class Branches(nn.Module):
    """Convolutions with and without bias, grouped, transposed, side by side, and a fully connected layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(5, 9, 3, padding=1)
        self.left, self.right = nn.Conv2d(9, 6, 1, bias=False), nn.Conv2d(9, 7, 5, padding=2)
        self.up = nn.ConvTranspose2d(13, 8, 2, stride=2)
        self.grouped, self.head = nn.Conv2d(8, 12, 3, stride=2, groups=2), nn.Linear(12, 10)

    def forward(self, x):
        x = torch.relu(self.first(x))
        x = torch.relu(self.up(torch.cat([self.left(x), self.right(x)], 1)))
        return self.head(torch.relu(self.grouped(x)).mean((2, 3)))


class Images:
    """Twelve fixed images of 20 × 12 pixels with five channels."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.rand(5, 20, 12, generator=torch.Generator().manual_seed(index)), index % 10


if __name__ == "__main__":
    torch.manual_seed(0)
    cell_probe._Trial.keeps_channels = lambda self, rows, parts: not parts
    cell_probe._Trial.keeps_rows = lambda self, parts, channels: False
    plan, bands, folder = sys.argv[1:]
    train = lockstep.Train(epochs=1, batch=6, lanes=2, bands=int(bands), slices=4)
    launch = lockstep.Launch(name="run", runs_dir=Path(folder), device="cpu", plan=plan, quiet=True)
    lockstep.train(lockstep.Run(train=train), Branches(), Images(), launch=launch)
