"""A model with stock kernels and fixed weights: logits of images that lie where they are read.

Evaluation and prediction use it as they use a network of fused kernels, and may capture it as a CUDA graph.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Protocol

import torch
from torch import Tensor, nn

from lockstep.kernels.device.flat import TYPES
from lockstep.kernels.device.scored import Scored
from lockstep.kernels.device.stock import Model
from lockstep.spec import Train
from lockstep.train.numerics import half_precision
from lockstep.train.state import model_tensors


class Inference(Protocol):
    """`lanes` blocks of `lane_size` images, and their scores; a network of fused kernels is one too."""

    lanes: int
    lane_size: int
    x: list[Tensor]  # the first is the images, N H W C, in a border of `pad`
    labels: Tensor
    logits: Tensor
    loss: Tensor
    right: Tensor

    @property
    def pad(self) -> tuple[int, int]: ...

    def forward(self, training: bool) -> None:
        """Images → logits."""

    def score(self) -> None:
        """Logits and labels → each sample's loss, and whether it is right."""


def fix_weights(module: nn.Module, precision: str) -> nn.Module:
    """A copy for inference, whose products have their weights in the type they are computed in.

    That type is what autocast would cast them to for every batch, so it changes no bit.
    """
    fixed: nn.Module = deepcopy(module).to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    for part in fixed.modules():
        vars(part).pop("forward", None)  # the dropout of a model that trains
        if isinstance(part, (nn.Conv2d, nn.Linear)):
            part.to(TYPES[precision][0])
    return fixed


class StockInference(Scored):
    """One block by stock kernels; the model's module has fixed weights."""

    pad = (0, 0)

    def __init__(self, model: Model, size: int, train: Train, device: torch.device) -> None:
        super().__init__(1, size, model.classes, train.label_smoothing, device)
        self._module, (channels, height, width) = model.module, model.image
        self._device, self._bf16, dtype = device, train.precision == "bf16", TYPES[train.precision][0]
        self.x = [torch.zeros(size, height, width, channels, dtype=dtype, device=device)]

    @torch.no_grad()
    def load(self, model: nn.Module) -> None:
        """Take the weights and statistics of a model."""
        own = model_tensors(self._module)
        for name, tensor in model_tensors(model).items():
            own[name].copy_(tensor)

    @torch.no_grad()
    def forward(self, training: bool = False) -> None:
        assert not training
        with half_precision(self._device, self._bf16):
            self.logits.copy_(self._module(self.x[0].permute(0, 3, 1, 2)))
