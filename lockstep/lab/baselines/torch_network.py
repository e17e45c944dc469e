"""emotion48 in plain PyTorch, as its users write it."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.lab.baselines.baseline_task import CLASSES, BaselineTask


def make_network(task: BaselineTask) -> nn.Sequential:
    """With the task's weights, channels last, on the CPU."""
    network = nn.Sequential(
        *(layer for pair in ((1, 32), (32, 64), (64, 128)) for layer in _block(*pair)),
        nn.Flatten(),
        nn.Linear(128 * 6 * 6, 256),
        nn.ReLU(),
        nn.Linear(256, CLASSES),
    )
    with torch.no_grad():
        for parameter, value in zip(network.parameters(), task.weights().values(), strict=True):
            parameter.copy_(torch.from_numpy(value))
    return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def _block(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)


def set_up_torch(task: BaselineTask) -> torch.device:
    """Threads and precision; gives the device."""
    torch.set_num_threads(task.cores)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = task.precision == "tf32"
    return torch.device(task.device)
