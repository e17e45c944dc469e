"""Compiled model, its layers: the modules that stand in for `torch.nn` layers and call `lane_function.py`.

`conv_probe` has chosen before how each convolution runs its lanes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from lockstep.errors import ModelError
from lockstep.kernels import random
from lockstep.kernels.global_average import GlobalAverage
from lockstep.kernels.stock.lane_function import Conv, lane_conv2d, lane_linear, lane_norm, pixel_mean

_Shape = tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    """Samples of a lane, lanes of the run, lanes that run at once, and the type of matrix products."""

    lane_size: int
    total_lanes: int
    lanes: int
    dtype: torch.dtype


class LaneConv2d(nn.Module):
    """A convolution of several lanes; it has the parameters of the layer that it replaces."""

    place = 0  # of this worker's part of its products; 0: it computes all of them

    def __init__(self, layer: nn.Conv2d, sizes: Sizes, conv: Conv) -> None:
        super().__init__()
        self.weight, self.bias, self.conv, self._dtype = layer.weight, layer.bias, conv, sizes.dtype

    def forward(self, x: Tensor) -> Tensor:
        return lane_conv2d(x.to(self._dtype), self.weight, self.bias, self.conv, self.place)


class LaneLinear(nn.Module):
    """A fully connected layer that computes lane by lane."""

    place = 0  # likewise

    def __init__(self, layer: nn.Linear, sizes: Sizes) -> None:
        super().__init__()
        self.weight, self.bias, self._sizes = layer.weight, layer.bias, sizes

    def forward(self, x: Tensor) -> Tensor:
        dtype, lane_size, total_lanes = self._sizes.dtype, self._sizes.lane_size, self._sizes.total_lanes
        return lane_linear(x.to(dtype), self.weight, self.bias, lane_size, total_lanes, self.place)


class LaneNorm(nn.Module):
    """A batch norm with statistics of each lane; it applies the ReLU that follows it, if there is one.

    `new_mean` and `new_var` receive the sums of the lanes' new running statistics.
    """

    running_mean: Tensor
    running_var: Tensor
    new_mean: Tensor
    new_var: Tensor

    def __init__(self, layer: nn.BatchNorm2d, sizes: Sizes, relu: bool) -> None:
        super().__init__()
        assert layer.running_mean is not None and layer.running_var is not None and layer.momentum is not None
        self.weight, self.bias = layer.weight, layer.bias
        for name, value in (("mean", layer.running_mean), ("var", layer.running_var)):
            self.register_buffer(f"running_{name}", value)
            self.register_buffer(f"new_{name}", torch.zeros_like(value))
        self._norm = sizes.lane_size, sizes.total_lanes, layer.eps, layer.momentum, relu

    def forward(self, x: Tensor) -> Tensor:
        running = self.running_mean, self.running_var
        y, mean, var = lane_norm(x, self.weight, self.bias, running, self._norm)
        with torch.no_grad():
            self.new_mean.copy_(mean)
            self.new_var.copy_(var)
        return y


class LaneDropout(nn.Module):
    """Dropout with a key for each lane."""

    keys: Tensor
    start: Tensor

    def __init__(self, layer: nn.Dropout, sizes: Sizes, device: torch.device) -> None:
        super().__init__()
        self.p, self._lane_size = layer.p, sizes.lane_size
        self.register_buffer("keys", torch.zeros(sizes.lanes, dtype=torch.int64, device=device))
        # a tensor, because torch's compiler would take a constant counter for an index and overflow
        self.register_buffer("start", torch.zeros(1, dtype=torch.int64, device=device))

    def forward(self, x: Tensor) -> Tensor:
        if not self.p:
            return x
        if self.p >= 1.0:
            return x * 0.0
        lanes = len(x) // self._lane_size
        counter = torch.arange(x.numel() // lanes, device=x.device) + self.start
        kept = (random.uniform(self.keys[:lanes, None], counter) >= self.p).view(x.shape)
        return x * (kept.to(x.dtype) * (1.0 / (1.0 - self.p)))


class LaneAverage(nn.Module):
    """The mean over pixels, summed in an order that does not depend on the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return pixel_mean(x)


@dataclass(frozen=True)
class Seen:
    """The input shape of each layer (C, H, W), values of the largest layer and of all layers, classes."""

    shapes: Mapping[str, _Shape]
    largest: int
    values: int
    classes: int


@torch.no_grad()
def look(model: nn.Module, images: Tensor) -> Seen:
    """Run some images through a model to see its shapes."""
    shapes: dict[str, _Shape] = {}
    sizes = [images[0].numel()]

    def note(name: str, layer: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        x = given[0]
        if len(x) != len(images) or (isinstance(layer, nn.Linear) and x.dim() != 2):
            raise ModelError(f"'{name}' ({type(layer).__name__}) is not given one row or image a sample")
        shapes[name] = tuple(x.shape[1:])
        sizes.append(output[0].numel())

    kinds = (nn.Conv2d, nn.Linear, nn.BatchNorm2d)
    for name, layer in model.named_modules():
        if isinstance(layer, kinds):
            layer.register_forward_hook(partial(note, name))
    outputs = model(images)
    heads = outputs if isinstance(outputs, tuple) else (outputs,)
    return Seen(shapes, max(sizes), sum(sizes), int(heads[0].shape[1]))


def by_lane(model: nn.Module, sizes: Sizes, convs: Mapping[str, Conv], device: torch.device) -> nn.Module:
    """Replace the model's layers, in place, by layers that compute several lanes."""
    made: dict[nn.Module, nn.Module] = {}  # a dropout may be used twice

    ended = _take_relus(model)

    def make(module: nn.Module, name: str) -> nn.Module:
        if isinstance(module, nn.Conv2d):
            return LaneConv2d(module, sizes, convs[name])
        if isinstance(module, nn.Linear):
            return LaneLinear(module, sizes)
        if isinstance(module, nn.BatchNorm2d):
            return LaneNorm(module, sizes, relu=module in ended)
        if isinstance(module, nn.Dropout):
            return LaneDropout(module, sizes, device)
        if isinstance(module, GlobalAverage):
            return LaneAverage()
        for key, child in module._modules.items():
            if child is not None:
                if child not in made:
                    made[child] = make(child, f"{name}.{key}" if name else key)
                module._modules[key] = made[child]
        return module

    return make(model, "")


def _take_relus(model: nn.Module) -> set[nn.Module]:
    """Remove each ReLU that follows a batch norm in a sequence; return these batch norms."""
    found: set[nn.Module] = set()
    for module in model.modules():
        kind, plain = type(module), nn.Sequential
        if kind.forward is plain.forward and getattr(kind, "__iter__", None) is plain.__iter__:
            layers = list(module._modules.items())
            for (_, norm), (name, relu) in pairwise(layers):
                if type(norm) is nn.BatchNorm2d and type(relu) is nn.ReLU:
                    found.add(norm)
                    module._modules[name] = nn.Identity()
    return found
