"""CUDA by hand: the kernels of `lockstep bench threads`, with as many threads as keep the GPU busy."""

from __future__ import annotations

import torch

from lockstep.lab.baselines.baseline_task import Array, BaselineTask
from lockstep.lab.baselines.contest import race
from lockstep.lab.threads.cuda_network import MANY_THREADS, CudaNetwork


class CudaContestant:
    """Grid-stride kernels in fp32; images stay on the GPU."""

    precision = "fp32"

    def __init__(self, task: BaselineTask) -> None:
        self._device, self._task = torch.device(task.device), task
        self._images, self._labels = (self._place(task.array(name)) for name in ("images", "labels"))
        self._weights = {name: torch.from_numpy(value) for name, value in task.weights().items()}
        self._network = self._make()

    def _make(self) -> CudaNetwork:
        return CudaNetwork(self._device, MANY_THREADS, self._task.batch, self._weights)

    def _place(self, array: Array) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def warm_up(self) -> None:
        """Compile by a step of another network with the same shapes."""
        size = self._task.batch
        self._make().step(self._images[:size], self._labels[:size], self._task.rate)
        torch.cuda.synchronize(self._device)

    def train(self, order: Array) -> list[float]:
        step, rate = self._network.step, self._task.rate
        steps = [step(self._images[ids], self._labels[ids], rate) for ids in self._place(order).flatten(0, 1)]
        return torch.stack(steps).tolist()

    def predict(self, images: Array) -> Array:
        return self._network.predict(self._place(images)).cpu().numpy()


if __name__ == "__main__":
    race(CudaContestant)
