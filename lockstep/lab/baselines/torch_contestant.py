"""PyTorch: a module, autograd and torch.optim.SGD; the argument `compile` brings torch.compile."""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lockstep.lab.baselines.baseline_task import Array, BaselineTask
from lockstep.lab.baselines.contest import race
from lockstep.lab.baselines.torch_network import make_network, set_up_torch

_WARM_UP = 3


class TorchContestant:
    """Images stay on the device; losses are read at the end."""

    def __init__(self, task: BaselineTask) -> None:
        device = set_up_torch(task)
        self.precision, self._device, self._batch = task.precision, device, task.batch
        self._network = make_network(task).to(device)
        self._optimizer = torch.optim.SGD(self._network.parameters(), lr=task.rate, fused=True)
        self._images, self._labels = (self._place(task.array(name)) for name in ("images", "labels"))
        self._score: Callable[[Tensor], Tensor] = self._forward
        if sys.argv[3:] == ["compile"]:
            compile_it: Any = torch.compile
            mode = "reduce-overhead" if device.type == "cuda" else "default"
            self._score = compile_it(self._forward, mode=mode, dynamic=False)

    def _forward(self, images: Tensor) -> Tensor:
        bf16 = self.precision == "bf16"
        with torch.autocast(self._device.type, torch.bfloat16, enabled=bf16):
            scores: Tensor = self._network(images.contiguous(memory_format=torch.channels_last))
        return scores.float()

    def _place(self, array: Array) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def warm_up(self) -> None:
        """Steps that compile, and record CUDA graphs; then the weights as before."""
        before = deepcopy(self._network.state_dict())
        for _ in range(_WARM_UP):
            self._step(torch.arange(self._batch, device=self._device))
        self._network.load_state_dict(before)

    def train(self, order: Array) -> list[float]:
        return torch.stack([self._step(ids) for ids in self._place(order).flatten(0, 1)]).tolist()

    def _step(self, ids: Tensor) -> Tensor:
        self._optimizer.zero_grad()
        loss = cross_entropy(self._score(self._images[ids]), self._labels[ids])
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return loss.detach().clone()

    def predict(self, images: Array) -> Array:
        with torch.no_grad():
            return self._score(self._place(images)).cpu().numpy()


if __name__ == "__main__":
    race(TorchContestant)
