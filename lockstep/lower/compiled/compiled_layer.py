"""Compiled model, its layers: the modules that stand in for `torch.nn` layers and call `lane_function.py`.

`conv_probe` has chosen before how each convolution runs its lanes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from lockstep.errors import ModelError
from lockstep.kernels import random
from lockstep.kernels.dropout import drop_paths, drop_paths_unscaled, find_drop
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

    def __init__(self, weight: Tensor, bias: Tensor | None, sizes: Sizes, conv: Conv) -> None:
        super().__init__()
        self.weight, self.bias, self.conv, self._dtype = weight, bias, conv, sizes.dtype

    def forward(self, x: Tensor) -> Tensor:
        return lane_conv2d(x.to(self._dtype), self.weight, self.bias, self.conv, self.place)


class LaneLinear(nn.Module):
    """A fully connected layer that computes lane by lane."""

    place = 0  # likewise

    def __init__(self, weight: Tensor, bias: Tensor | None, sizes: Sizes) -> None:
        super().__init__()
        self.weight, self.bias, self._sizes = weight, bias, sizes

    def forward(self, x: Tensor) -> Tensor:
        rows = x.to(self._sizes.dtype).flatten(0, -2)
        lane_size, total_lanes = self._sizes.lane_size * (len(rows) // len(x)), self._sizes.total_lanes
        y = lane_linear(rows, self.weight, self.bias, lane_size, total_lanes, self.place)
        return y.view(*x.shape[:-1], -1)


class LaneNorm(nn.Module):
    """A batch norm with statistics of each lane; it applies the activation that follows it, if it can.

    `news` receives the sums of the lanes' new running means and variances.
    """

    running_mean: Tensor
    running_var: Tensor
    news: Tensor
    act = ""

    def __init__(
        self, affine: tuple[Tensor, Tensor], running: tuple[Tensor, Tensor], rule: tuple[float, float],
        sizes: Sizes,
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight, self.bias = affine
        for name, value in zip(("mean", "var"), running, strict=True):
            self.register_buffer(f"running_{name}", value)
        self.register_buffer("news", torch.stack([torch.zeros_like(value) for value in running]))
        self._norm = sizes.lane_size, sizes.total_lanes, *rule  # eps and momentum

    def forward(self, x: Tensor) -> Tensor:
        running = self.running_mean, self.running_var
        y, news = lane_norm(x, self.weight, self.bias, running, (*self._norm, self.act))
        with torch.no_grad():
            self.news.copy_(news)
        return y


class LaneDropout(nn.Module):
    """Dropout with a key for each lane."""

    keys: Tensor
    start: Tensor

    def __init__(self, p: float, sizes: Sizes, device: torch.device) -> None:
        super().__init__()
        self.p, self._lane_size = p, sizes.lane_size
        self.register_buffer("keys", torch.zeros(sizes.lanes, dtype=torch.int64, device=device))
        # a tensor, because torch's compiler would take a constant counter for an index and overflow
        self.register_buffer("start", torch.zeros(1, dtype=torch.int64, device=device))

    def forward(self, x: Tensor) -> Tensor:
        if not self.p:
            return x
        if self.p >= 1.0:
            return x * 0.0
        return x * (self._kept(x.shape, x.device).to(x.dtype) * (1.0 / (1.0 - self.p)))

    def _kept(self, shape: torch.Size, device: torch.device) -> Tensor:
        """Which elements of `shape` are kept, each lane by its own key."""
        lanes = shape[0] // self._lane_size
        counter = torch.arange(shape.numel() // lanes, device=device) + self.start
        return (random.uniform(self.keys[:lanes, None], counter) >= self.p).view(shape)


class LanePath(LaneDropout):
    """Stochastic depth with a key for each lane."""

    def __init__(self, p: float, is_scaled: bool, sizes: Sizes, device: torch.device) -> None:
        super().__init__(p, sizes, device)
        self._factor = 1.0 / (1.0 - p) if is_scaled and p < 1.0 else 1.0

    def forward(self, x: Tensor) -> Tensor:
        if not self.p:
            return x
        kept = self._kept(x.shape[:1], x.device).to(x.dtype) * self._factor
        return x * kept.view(-1, *[1] * (x.dim() - 1))


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

    @property
    def counts(self) -> tuple[int, int]:
        """Values of the largest layer, and of all layers."""
        return self.largest, self.values


@torch.no_grad()
def look(model: nn.Module, images: Tensor) -> Seen:
    """Run some images through a model to see its shapes."""
    shapes: dict[str, _Shape] = {}
    sizes = [images[0].numel()]

    def note(name: str, layer: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        x = given[0]
        if len(x) != len(images) or x.dim() < 2:
            raise ModelError(f"'{name}' ({type(layer).__name__}) is not given one row or image a sample")
        shapes[name] = tuple(x.shape[1:])
        sizes.append(output[0].numel())

    kinds = (nn.Conv2d, nn.ConvTranspose2d, nn.Linear, nn.BatchNorm2d)
    for name, layer in model.named_modules():
        if isinstance(layer, kinds):
            layer.register_forward_hook(partial(note, name))
    outputs = model(images)
    heads = outputs if isinstance(outputs, tuple) else (outputs,)
    if any(head.dim() != 2 or len(head) != len(images) for head in heads):
        raise ModelError("it does not give one row of logits a sample")
    return Seen(shapes, max(sizes), sum(sizes), int(heads[0].shape[1]))


def by_lane(model: nn.Module, sizes: Sizes, convs: Mapping[str, Conv], device: torch.device) -> nn.Module:
    """Replace the model's layers, in place, by layers that compute several lanes."""
    made: dict[nn.Module, nn.Module] = {}  # a dropout may be used twice

    def make(module: nn.Module, name: str) -> nn.Module:
        kind = type(module)
        if isinstance(module, nn.Conv2d) and kind is nn.Conv2d:
            return LaneConv2d(module.weight, module.bias, sizes, convs[name])
        if isinstance(module, nn.Linear) and kind is nn.Linear:
            return LaneLinear(module.weight, module.bias, sizes)
        if isinstance(module, nn.BatchNorm2d) and kind is nn.BatchNorm2d:
            return norm_by_lane(module, sizes)
        if isinstance(module, nn.Dropout) and kind is nn.Dropout:
            return LaneDropout(module.p, sizes, device)
        drop, rate = find_drop(module) or (None, "")
        if drop in (drop_paths, drop_paths_unscaled):
            return LanePath(getattr(module, rate) or 0.0, drop is drop_paths, sizes, device)
        if kind is GlobalAverage:
            return LaneAverage()
        for key, child in module._modules.items():
            if child is not None:
                if child not in made:
                    made[child] = make(child, f"{name}.{key}" if name else key)
                module._modules[key] = made[child]
        return module

    return make(model, "")


def norm_by_lane(layer: nn.BatchNorm2d, sizes: Sizes) -> LaneNorm:
    """The layer that takes its place."""
    assert layer.running_mean is not None and layer.running_var is not None and layer.momentum is not None
    running = layer.running_mean, layer.running_var
    return LaneNorm((layer.weight, layer.bias), running, (layer.eps, layer.momentum), sizes)
