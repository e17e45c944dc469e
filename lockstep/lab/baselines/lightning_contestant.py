"""Lightning: the same module and optimizer, and its Trainer drives the steps."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import lightning
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from lockstep.lab.baselines.baseline_task import Array, BaselineTask
from lockstep.lab.baselines.contest import race
from lockstep.lab.baselines.torch_network import make_network, set_up_torch

_PRECISION: dict[str, Any] = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed"}


class _Batches(Dataset[Any]):
    """Whole batches at once, from images that stay on the device."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self._images, self._labels = images, labels

    def __getitems__(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        places = torch.tensor(ids, device=self._images.device)
        return self._images[places], self._labels[places]


class _Order:
    """The samples of every step, another epoch at every turn."""

    def __init__(self, order: Array) -> None:
        self._epochs, self._steps = iter(order.tolist()), order.shape[1]

    def __len__(self) -> int:
        return int(self._steps)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(next(self._epochs))


class _Module(lightning.LightningModule):
    """What a Trainer trains."""

    def __init__(self, task: BaselineTask) -> None:
        super().__init__()
        self.network, self._rate = make_network(task), task.rate
        self.losses = list[Tensor]()

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.network(images.contiguous(memory_format=torch.channels_last))
        return scores

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        loss = cross_entropy(self(batch[0]).float(), batch[1])
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self._rate, fused=True)


class LightningContestant:
    """One Trainer for all epochs; what it prepares is part of its time."""

    def __init__(self, task: BaselineTask) -> None:
        for name in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
        self._device, self._task, self.precision = set_up_torch(task), task, task.precision
        images, labels = (
            torch.from_numpy(task.array(name)).to(self._device) for name in ("images", "labels")
        )
        self._data, self._module = _Batches(images, labels), _Module(task)

    def _fit(self, module: _Module, order: Array) -> list[float]:
        sampler: Any = _Order(order)
        loader = DataLoader(self._data, batch_sampler=sampler, collate_fn=lambda batch: batch)
        lightning.Trainer(
            max_epochs=len(order),
            accelerator="gpu" if self._device.type == "cuda" else "cpu",
            devices=1,
            precision=_PRECISION[self.precision],
            plugins=[LightningEnvironment()],  # else it looks for MPI, which may be half installed
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(module, loader)
        return torch.stack(module.losses).tolist()

    def warm_up(self) -> None:
        """One step of another module."""
        self._fit(_Module(self._task), self._task.array("order")[:1, :1])

    def train(self, order: Array) -> list[float]:
        return self._fit(self._module, order)

    def predict(self, images: Array) -> Array:
        module = self._module.to(self._device)
        bf16 = self.precision == "bf16"
        with torch.inference_mode(), torch.autocast(self._device.type, torch.bfloat16, enabled=bf16):
            scores: Tensor = module(torch.from_numpy(images).to(self._device))
            return scores.float().cpu().numpy()


if __name__ == "__main__":
    race(LightningContestant)
