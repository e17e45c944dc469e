"""A model whose products read what a GPU's matrix units read of fp32 in tf32: ten bits, the rest cut off."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Product = Callable[[Tensor, Tensor], Tensor]


def cut(x: Tensor) -> Tensor:
    return (x.float().contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32).to(x.dtype)


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, product: Product) -> Tensor:
        ctx.save_for_backward(cut(x), cut(w))
        ctx.product = product
        return product(*ctx.to_save)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        given = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            found = ctx.product(*given)
        return *torch.autograd.grad(found, given, cut(grads[0])), None


def in_tf32(model: nn.Module) -> nn.Module:
    """The model, with all else as precise as it was."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.forward = partial(_forward, layer)
    return model


def _forward(layer: nn.Conv2d | nn.Linear, x: Tensor) -> Tensor:
    product: Product = F.linear
    if isinstance(layer, nn.Conv2d):
        options = {"stride": layer.stride, "padding": layer.padding, "groups": layer.groups}
        product = partial(F.conv2d, bias=None, **options)
    y: Tensor = _Cut.apply(x, layer.weight, product)
    return y if layer.bias is None else y + layer.bias.view(-1, *(1,) * (y.ndim - 2))
