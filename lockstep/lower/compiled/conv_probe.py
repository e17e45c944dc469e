"""Compiled model, a probe: which convolutions give the same bits with all lanes at once as lane by lane.

Stock kernels promise nothing of the kind, and choose by the size of a batch. So every convolution of a model
is tried on fixed values of its shapes, with every number of lanes that a worker may have at once; the choice
does not depend on how many it has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from lockstep.kernels import random
from lockstep.kernels.stock.lane_function import Conv
from lockstep.kernels.stock.stock_conv import stock_conv, stock_conv_backward
from lockstep.spec import Train

_Shape = tuple[int, ...]
# stock kernels are slow with convolutions of images and of single pixels; in types that matrix units take
OWN_CHANNELS, OWN_TYPES = 4, (torch.bfloat16, torch.float16)


def choose_convs(
    model: nn.Module, shapes: Mapping[str, _Shape], train: Train, dtype: torch.dtype
) -> dict[str, Conv]:
    """For every convolution of a model, given the C, H, W of its input, how it runs."""
    found: dict[str, Conv] = {}
    known: dict[tuple[Conv, _Shape, _Shape], Conv] = {}  # many are alike
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d) and type(layer) is nn.Conv2d:
            image = shapes[name]
            conv = describe_conv(layer, train, dtype, image)
            key = conv, tuple(layer.weight.shape), image
            if key not in known:
                known[key] = conv if layer.weight.is_meta else find_at_once(conv, layer.weight, image, dtype)
            found[name] = known[key]
    return found


def convs_digest(convs: Mapping[str, Conv]) -> str:
    """A short hash of all choices."""
    return hashlib.sha256(repr(sorted(convs.items())).encode()).hexdigest()[:16]


def describe_conv(layer: nn.Conv2d, train: Train, dtype: torch.dtype, image: _Shape = ()) -> Conv:
    """How a convolution runs, as far as that needs no probe."""
    assert not isinstance(layer.padding, str)
    options = _pair(layer.stride), _pair(layer.padding), _pair(layer.dilation)
    conv = Conv(*options, layer.groups, train.batch // train.lanes, train.lanes)
    if layer.groups == layer.in_channels == layer.out_channels > 1:  # each channel by a filter of its own
        return conv._replace(own=True)
    if _is_row(conv, tuple(layer.weight.shape), image) and dtype in OWN_TYPES:
        return conv._replace(own=True)
    plain = conv.stride[0] == conv.stride[1] and conv.dilation == (1, 1) and conv.groups == 1
    return conv._replace(own=plain and layer.in_channels <= OWN_CHANNELS and dtype in OWN_TYPES)


def _is_row(conv: Conv, weight: _Shape, image: _Shape) -> bool:
    """Whether it is a product of a single pixel's channels, as in squeeze-and-excite."""
    return image[1:] == (1, 1) and weight[2:] == (1, 1) and conv.groups == 1 and conv.padding == (0, 0)


def _pair(numbers: tuple[int, ...]) -> tuple[int, int]:
    return numbers[0], numbers[1]


@torch.no_grad()
def find_at_once(conv: Conv, weight: Tensor, image: _Shape, dtype: torch.dtype) -> Conv:
    """Whether forward and data gradient give a sample the same bits in any number of lanes at once."""
    is_own = conv.own and (conv.groups > 1 or _is_row(conv, tuple(weight.shape), image))
    if conv.total_lanes == 1 or is_own:  # then both ways are one
        return conv._replace(forward_at_once=True, gradient_at_once=True)
    x = _values("x", (conv.lane_size, *image), weight, dtype)
    w = _values("w", tuple(weight.shape), weight, dtype)
    options = conv.stride, conv.padding, conv.dilation, conv.groups

    def forward(part: Tensor) -> Tensor:
        return stock_conv(part, w, options)

    def gradient(part: Tensor, given: Tensor) -> Tensor:
        return stock_conv_backward(part, given, w, options, 0)

    g, most = _values("g", tuple(forward(x).shape), weight, dtype), conv.total_lanes
    at_once = conv.own or _is_same(forward, most, x), _is_same(gradient, most, g, x)
    return conv._replace(forward_at_once=at_once[0], gradient_at_once=at_once[1])


def _is_same(run: Callable[..., Tensor], most: int, *lane: Tensor) -> bool:
    """Whether every power of two of equal lanes gives each of them what it gets by itself."""
    alone, lanes = run(*lane), 2
    while lanes <= most:
        found = run(*(_repeated(tensor, lanes) for tensor in lane))
        if not torch.equal(found, _repeated(alone, lanes)):
            return False
        lanes *= 2
    return True


def _repeated(x: Tensor, lanes: int) -> Tensor:
    return x.repeat(lanes, 1, 1, 1).contiguous(memory_format=torch.channels_last)


def _values(name: str, shape: _Shape, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Fixed values in [−1, 1), lying channels last."""
    counter = torch.arange(torch.Size(shape).numel(), device=like.device)
    values = random.symmetric(random.key("at once", name), counter).view(shape).to(dtype)
    return values.contiguous(memory_format=torch.channels_last)
