"""emotion48 in hand-written CUDA C++, trained by T threads: the same bits at every T."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from math import isqrt

import torch
from torch import Tensor

from lockstep.errors import LockstepError
from lockstep.lab.threads.cuda_layer import CudaBlock, CudaLinear, FlatTensors
from lockstep.lab.threads.grid_kernel import BLOCK, GridKernel, Load, load_on_gpu

MANY_THREADS = 1 << 18  # more than any GPU runs at once
_BLOCKS = ("blocks.block1.0", "blocks.block2.0", "blocks.block3.0")
_LINEAR = ("blocks.hidden.1", "blocks.classifier")


class CudaNetwork:
    """Forward pass and training in float32; every kernel is started with `threads` threads in all.

    `weights` are those of emotion48's state dict, of any numbers of filters that the kernels take; the
    images' side follows from them. `batch` is the most images at once.
    """

    def __init__(
        self,
        device: torch.device,
        threads: int,
        batch: int,
        weights: Mapping[str, Tensor],
        *,
        momentum: float = 0.0,
        load: Load = load_on_gpu,
    ) -> None:
        if threads < 1 or (threads > BLOCK and threads % BLOCK):
            raise LockstepError(f"{threads} threads: give 1 to {BLOCK}, or a multiple of {BLOCK}")

        def make(name: str, macros: Mapping[str, int]) -> GridKernel:
            return GridKernel(load, device, threads, name, macros)

        self._batch, self._momentum = batch, momentum
        shapes = {name: value.shape for name, value in weights.items()}
        self._weights, self._gradients = FlatTensors(shapes, device), FlatTensors(shapes, device)
        self._velocity = torch.zeros_like(self._weights.all)
        for name, value in weights.items():
            self._weights.named[name].copy_(value)
        last = shapes[f"{_BLOCKS[-1]}.weight"][0]
        self.side = 8 * isqrt(shapes[f"{_LINEAR[0]}.weight"][1] // last)
        self._layers: list[CudaBlock | CudaLinear] = [
            CudaBlock(make, batch, self.side >> place, self._of(name), is_first=place == 0)
            for place, name in enumerate(_BLOCKS)
        ]
        self._layers += [
            CudaLinear(make, batch, self._of(name), has_relu=name != _LINEAR[-1]) for name in _LINEAR
        ]
        self._classes = shapes[f"{_LINEAR[-1]}.weight"][0]
        self._score = make("softmax_cross_entropy", {"CLASSES": self._classes})
        self._add, self._update = make("add_parts", {}), make("update", {})
        self._losses = torch.empty(batch, device=device)
        self._gradient = torch.empty(batch, self._classes, device=device)

    def _of(self, layer: str) -> tuple[Tensor, ...]:
        """A layer's weight, bias, and their gradients."""
        names = f"{layer}.weight", f"{layer}.bias"
        return tuple(each.named[name] for each in (self._weights, self._gradients) for name in names)

    def step(self, images: Tensor, labels: Tensor, rate: float) -> Tensor:
        """Train by one batch; the mean loss before it, which is not waited for."""
        loss = self.gradients(images, labels)
        self._update(
            self._weights.all,
            self._gradients.all,
            self._velocity,
            len(self._velocity) // 4,
            float(rate),
            self._momentum,
        )
        return loss

    def gradients(self, images: Tensor, labels: Tensor) -> Tensor:
        """The mean loss; the gradients are kept for an update."""
        count = len(images)
        scores, loss = self._forward(images), torch.empty((), device=images.device)
        self._score(scores, labels.to(torch.int32), self._losses, self._gradient, count)
        self._add(self._losses, loss, 1, count)
        gradient = self._gradient
        for layer in reversed(self._layers):
            gradient = layer.backward(gradient, count)
        return loss

    def predict(self, images: Tensor) -> Tensor:
        """Scores [N, classes]; the highest is the class."""
        return torch.cat(
            [self._forward(part)[: len(part)].clone() for part in torch.split(images, self._batch)]
        )

    def _forward(self, images: Tensor) -> Tensor:
        count, shape = len(images), (1, self.side, self.side)
        if not 1 <= count <= self._batch or images.shape[1:] != shape or images.dtype != torch.float32:
            raise LockstepError(
                f"images {images.dtype} {tuple(images.shape)}: give 1 to {self._batch} of {shape} in float32"
            )
        values = images.contiguous()
        for layer in self._layers:
            values = layer.forward(values, count)
        return values

    def weights(self) -> dict[str, Tensor]:
        """A copy, by the names they were given with."""
        return {name: value.clone() for name, value in self._weights.named.items()}

    def weights_sha256(self) -> str:
        """One hash of all weights, in the order of their names."""
        found = hashlib.sha256()
        for name, value in sorted(self._weights.named.items()):
            found.update(name.encode() + value.cpu().numpy().tobytes())
        return found.hexdigest()
