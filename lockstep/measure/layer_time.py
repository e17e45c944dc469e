"""Seconds of every layer by itself, forward and backward, whole and in the parts that plans give to a worker.

Half the filters do not take half the time, so parts are computed at their own shapes: by channel the forward
pass and the weight's gradient of some filters, and the gradient of some input channels from all of the
output's; by rows all of it for some rows and their halo.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.kernels.numerics import half_precision
from lockstep.measure.layer_count import LayerCall
from lockstep.spec.profile import LayerProfile, LayerTime

_LEAST_S = 0.002  # a shorter call is repeated within a round, so that the clock can see it
Key = tuple[Any, ...]


class LayerTimer:
    """Times layers; those of the same kind and shape once."""

    def __init__(self, half: torch.dtype | None, rounds: int = 5) -> None:
        self._half, self._rounds = half, rounds
        self._known: dict[Key, tuple[float, float]] = {}

    def time(self, call: LayerCall, parts: Sequence[tuple[str, int]]) -> LayerProfile:
        """The layer with its seconds for as many images as it was given; `parts` as in ("channel", 2)."""
        times = [self._time(call, "", 1), *(self._time(call, axis, n) for axis, n in parts)]
        found = (*call.profile.times, *(time for time in times if time))
        return replace(call.profile, times=found)

    def _time(self, call: LayerCall, axis: str, count: int) -> LayerTime | None:
        module, x = call.module, call.given
        if axis and not isinstance(module, (nn.Conv2d, nn.Linear)):
            return None
        key = (_describe(module), tuple(x.shape), x.is_contiguous(), call.is_first, axis, count)
        if key not in self._known:
            found = self._measure(_out_of_place(module), x, axis, count, not call.is_first)
            if found is None:
                return None
            self._known[key] = found
        forward_s, backward_s = self._known[key]
        return LayerTime(len(x), forward_s, backward_s, f"{axis}={count}" if axis else "")

    def _measure(
        self, module: nn.Module, x: Tensor, axis: str, count: int, gives_back: bool
    ) -> tuple[float, float] | None:
        if axis == "channel":
            return self._by_channel(module, x, count, gives_back)
        if axis == "spatial":
            if x.dim() < 4 or x.shape[2] < 4 * count:
                return None
            rows = -(-x.shape[2] // count) + int(getattr(module, "kernel_size", (1,))[0]) - 1
            x = x[:, :, : min(rows, x.shape[2])].contiguous()
        return self._whole(module, x, gives_back)

    def _whole(self, module: nn.Module, x: Tensor, gives_back: bool) -> tuple[float, float]:
        x = x.clone().requires_grad_(gives_back)
        inputs = [part for part in (x, *module.parameters()) if part.requires_grad]
        y = self._forward(module, x)
        if not inputs or not isinstance(y, Tensor) or not y.requires_grad:
            return self._median(lambda: self._forward(module, x), x), 0.0
        dy = torch.ones_like(y)
        forward_s = self._median(lambda: self._forward(module, x), x)

        def backward() -> None:
            torch.autograd.grad(y, inputs, dy, retain_graph=True, allow_unused=True)

        return forward_s, self._median(backward, x)

    def _by_channel(
        self, module: nn.Module, x: Tensor, count: int, gives_back: bool
    ) -> tuple[float, float] | None:
        """Some filters forward and for the weight's gradient, some input channels for the data gradient."""
        weight = module.weight.detach()  # type: ignore[operator]
        if len(weight) < count or weight.shape[1] < count:
            return None
        outs, ins = -(-len(weight) // count), -(-weight.shape[1] // count)
        if isinstance(module, nn.Linear):
            part = nn.Linear(module.in_features, outs, device=x.device)
            return self._whole(part, x, gives_back)
        assert isinstance(module, nn.Conv2d)
        if module.groups > 1:  # whole groups: no exchange
            groups = max(module.groups // count, 1)
            channels = x.shape[1] * groups // module.groups
            part_of_groups = _conv(module, channels, len(weight) * groups // module.groups, groups, x)
            return self._whole(part_of_groups, x[:, :channels].contiguous(), gives_back)
        own, back = _conv(module, x.shape[1], outs, 1, x), _conv(module, ins, len(weight), 1, x)
        forward_s, weight_s = self._passes(own, x, (False, True, False))
        if not gives_back:
            return forward_s, weight_s
        _, data_s = self._passes(back, x[:, :ins].contiguous(), (True, False, False))
        return forward_s, weight_s + data_s

    def _passes(self, conv: nn.Conv2d, x: Tensor, mask: tuple[bool, bool, bool]) -> tuple[float, float]:
        """Seconds forward, and of those gradients (input, weight, bias) that the mask names."""
        y = conv(x).detach()
        dy, sizes = torch.ones_like(y), [len(y[0])] if conv.bias is not None else None

        def backward() -> None:
            torch.ops.aten.convolution_backward(
                dy, x, conv.weight.detach(), sizes, conv.stride, conv.padding, conv.dilation, False, [0, 0],
                conv.groups, mask,
            )  # fmt: skip

        with torch.no_grad():
            return self._median(lambda: conv(x), x), self._median(backward, x)

    def _forward(self, module: nn.Module, x: Tensor) -> Any:
        with half_precision(x.device, self._half):
            return module(x)

    def _median(self, call: Callable[[], object], x: Tensor) -> float:
        once, repeats = _clock(call, x, 1), 1
        if once < _LEAST_S:
            once = _clock(call, x, 1)
            repeats = min(int(_LEAST_S / max(once, 1e-6)) + 1, 200)
        return statistics.median(_clock(call, x, repeats) for _ in range(self._rounds))


def _clock(call: Callable[[], object], x: Tensor, repeats: int) -> float:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return (time.perf_counter() - start) / repeats


def _conv(like: nn.Conv2d, ins: int, outs: int, groups: int, x: Tensor) -> nn.Conv2d:
    """A convolution like another, with other numbers of channels, in the memory format of `x`."""
    last = (
        torch.channels_last if x.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format
    )
    kinds: list[Any] = [
        like.kernel_size,
        like.stride,
        like.padding,
        like.dilation,
        groups,
        like.bias is not None,
    ]
    made = nn.Conv2d(ins, outs, *kinds).to(x.device)
    return made.to(memory_format=last)  # type: ignore[call-overload,no-any-return]


def _out_of_place(module: nn.Module) -> nn.Module:
    """The same layer with a result of its own, as what it is given here must stay."""
    if not getattr(module, "inplace", False):
        return module
    same = copy.copy(module)
    same.inplace = False  # type: ignore[assignment]
    return same


def _describe(module: nn.Module) -> str:
    """What it computes: its class and its settings, as torch prints them."""
    return f"{type(module).__name__}({module.extra_repr()})"
