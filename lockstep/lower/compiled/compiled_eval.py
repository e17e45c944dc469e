"""Executes a compiled model in eval mode, or a part of it, with fixed weights, on one block of images.

Its calls can be captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lockstep.kernels.numerics import half_precision, half_type
from lockstep.kernels.triton.conv.tile import KERNEL_TYPES
from lockstep.lower.compiled.compiled_network import CompiledModel
from lockstep.lower.compiled.compiled_part import without_gaps
from lockstep.lower.eval_network import ScoreBuffers
from lockstep.models.tensors import copy_part, model_tensors
from lockstep.spec import Train


def fix_weights(
    module: nn.Module, precision: str, has: Callable[[str], bool] = lambda name: True
) -> nn.Module:
    """A copy for inference, with weights in the type of the matrix products; of a part, what it `has`.

    Autocast would cast them to this type for every batch, so this changes no bit.
    """
    fixed: nn.Module = copy_part(module, has).to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    for part in fixed.modules():
        vars(part).pop("forward", None)  # our keyed dropout of a model in training
        if isinstance(part, (nn.Conv2d, nn.Linear)):
            part.to(KERNEL_TYPES[precision][0])
    return fixed


class CompiledEval(ScoreBuffers):
    """Evaluates one block of images with PyTorch's kernels; the weights of its module are fixed."""

    pad = (0, 0)

    def __init__(self, model: CompiledModel, size: int, train: Train, device: torch.device) -> None:
        super().__init__(1, size, model.classes, train.label_smoothing, device)
        self._module, self._is_first, (channels, height, width) = model.module, model.is_first, model.image
        self._blocks, self._is_last = model.forwards(model.module, lambda module: module), model.is_last
        self._device, self._half, dtype = device, half_type(train.precision), KERNEL_TYPES[train.precision][0]
        self.x = [torch.zeros(size, height, width, channels, dtype=dtype, device=device)]

    @torch.no_grad()
    def load(self, model: nn.Module) -> None:
        """Copy the weights and statistics of a model."""
        given = model_tensors(model)
        for name, tensor in model_tensors(self._module).items():
            tensor.copy_(given[name])

    def make_weights(self) -> None:
        """Have memory for weights again, as they lay before."""
        for parameter, stride in zip(self._params, self._strides, strict=True):
            parameter.data = torch.empty_strided(
                parameter.shape, stride, dtype=parameter.dtype, device=self._device
            )

    def drop_tables(self) -> None:
        """Free the weights until `make_weights`."""
        self._params = [p for p in self._module.parameters() if not p.is_meta]
        self._strides = [p.stride() for p in self._params]
        for parameter in self._params:
            parameter.data = parameter.new_zeros(()).expand(parameter.shape)

    def enter(self, given: Sequence[Tensor]) -> None:
        """Take images [N, H, W, C], or the output of the part before."""
        if self._is_first:
            self.x[0].copy_(given[0])
        else:
            self._given = given[0]

    @torch.no_grad()
    def forward(self, training: bool = False) -> None:
        assert not training
        x = self.x[0].permute(0, 3, 1, 2) if self._is_first else self._given
        with half_precision(self._device, self._half):
            for block in self._blocks:
                x, *_ = block(x)
        if self._is_last:
            self.logits.copy_(x)
        else:
            self._output = x

    def leave(self) -> list[Tensor]:
        """The output of a part."""
        return [without_gaps(self._output)]
