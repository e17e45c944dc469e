"""A module with a long skip, batch norm, dropout and stochastic depth, trained under a plan.

PLAN=data=2,pipeline=2 python benchmarks/plan_model.py FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import lockstep


class LongSkip(nn.Module):
    """What the first layer gives is added before the last one, over everything in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.middle = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
            for _ in range(4)
        )
        self.drop, self.last = nn.Dropout(0.2), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        start = y = self.first(x)
        for layer in self.middle:
            kept = x.new_empty(x.size(0), 1, 1, 1).bernoulli_(0.8) if self.training else 1.0
            y = y + layer(y) * kept  # stochastic depth
        return self.last(self.drop((y + start).mean((2, 3))))


class Images:
    """Random images, the same in every process."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(index)), index % 10


def main() -> None:
    torch.manual_seed(0)
    train = lockstep.Train(epochs=1, batch=32, lanes=8, clip=1.0, ema=0.9)
    launch = lockstep.Launch(
        name="run", runs_dir=Path(sys.argv[1]), device="cpu", plan=os.environ["PLAN"], quiet=True
    )
    lockstep.train(lockstep.Run(train=train), LongSkip(), Images(712), launch=launch)


if __name__ == "__main__":
    main()
