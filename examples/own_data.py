"""Train on data of your own: any object with a length that gives (image, label) by number."""

import torch
from torch import Tensor

import lockstep


class Stripes:
    """Striped images; the label is the direction of the stripes."""

    classes = ("horizontal", "vertical", "diagonal")

    def __init__(self, length: int, seed: int) -> None:
        self.length, self.seed = length, seed

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        label = index % 3
        period, phase = torch.randint(4, 8, (2,), generator=draw).tolist()
        y, x = torch.meshgrid(torch.arange(24), torch.arange(24), indexing="ij")
        position = (y, x, x + y)[label]
        stripes = ((position + phase) // (period // 2) % 2).to(torch.uint8) * 120
        noise = torch.randint(0, 100, (24, 24), generator=draw, dtype=torch.uint8)
        return stripes + noise, label


run = lockstep.Run(
    model=lockstep.Model("lenet5"),
    data=lockstep.Data(augment=("flip",)),
    train=lockstep.Train(epochs=6, batch=64, lanes=4),
    optimizer=lockstep.Optimizer("momentum", lr=0.02),
)
result = lockstep.train(run, data=(Stripes(768, seed=0), Stripes(192, seed=1)))
print(f"{100 * result.summary['accuracy']:.1f} %")
