"""Measures every algorithm on every layer and pass: time, error against float64, work and depth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional, grad

from lockstep.errors import LockstepError
from lockstep.lab.conv.conv_algorithm import CONV_ALGORITHMS, ConvAlgorithm, run_conv
from lockstep.lab.conv.conv_input import ConvRefused
from lockstep.lab.conv.conv_shape import ConvPass, ConvShape
from lockstep.lab.conv.conv_work import count_operations, depth_of, work_of
from lockstep.lab.timing import time_call
from lockstep.measure.probe_device import TimedRounds

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
LIBRARY = "library of torch"
_PATIENCE_S = 1.5  # an algorithm that would take longer is left out
_TELLING = 1e7  # operations from which on a layer says how fast others will be


@dataclass(frozen=True)
class ConvTime:
    """One algorithm, or the library, in one pass of one layer."""

    algorithm: str
    layer: str
    shape: ConvShape
    which: ConvPass
    time: TimedRounds
    error: float
    work: float | None = None  # the library does not say what it does
    operations: int | None = None
    depth: int | None = None

    @property
    def gflop_s(self) -> float:
        """Of the direct algorithm's operations, so that algorithms with fewer are seen to be faster."""
        return 1e-9 * self.shape.operations / self.time.median


@dataclass(frozen=True)
class SkippedConv:
    """What was not measured, and why."""

    algorithm: str
    layer: str
    which: ConvPass
    why: str


class ConvTimer:
    """Times algorithms; what would take too long, even as fast as it ever was, is refused."""

    def __init__(self, device: torch.device, budget_s: float, patience_s: float) -> None:
        self._device, self._budget_s, self._patience_s = device, budget_s, patience_s
        self._rates = dict[tuple[str, ConvPass], float]()

    def time(
        self, name: str, which: ConvPass, operations: int, call: Callable[[], Tensor]
    ) -> tuple[TimedRounds, Tensor]:
        """Seconds, and the result of a first call, which compiles what there is to compile."""
        expected_s = self._rates.get((name, which), 0.0) * operations
        if expected_s > self._patience_s:
            raise ConvRefused(f"{name}: would take about {expected_s:.1f} s")
        result = call()
        found = time_call(call, self._device, self._budget_s)
        if operations > _TELLING:
            rate = min(found.seconds) / operations
            self._rates[name, which] = min(rate, self._rates.get((name, which), inf))
        return found, result


def measure_conv(
    device: torch.device,
    layers: Mapping[str, ConvShape],
    passes: Sequence[ConvPass],
    precision: torch.dtype,
    budget_s: float,
) -> Iterator[ConvTime | SkippedConv]:
    """All algorithms, then the library, for every layer and pass; what cannot run says why."""
    timer = ConvTimer(device, budget_s, _PATIENCE_S)
    for (layer, shape), which in product(layers.items(), passes):
        operands = make_operands(shape, which, precision, device)
        exact = library_conv(shape, which, *(each.double() for each in operands))
        for algorithm in (*CONV_ALGORITHMS, None):
            try:
                yield _measure(timer, algorithm, layer, shape, which, operands, exact)
            except LockstepError as refusal:
                name = algorithm.name if algorithm else LIBRARY
                why = str(refusal).splitlines()[0].removeprefix(f"{name}: ")
                yield SkippedConv(name, layer, which, why)


def _measure(
    timer: ConvTimer,
    algorithm: ConvAlgorithm | None,
    layer: str,
    shape: ConvShape,
    which: ConvPass,
    operands: tuple[Tensor, Tensor],
    exact: Tensor,
) -> ConvTime:
    """One algorithm; None is the library."""
    if algorithm is None:
        call = partial(library_conv, shape, which, *operands)
        found, result = timer.time(LIBRARY, which, shape.operations, call)
        return ConvTime(LIBRARY, layer, shape, which, found, error_of_conv(result, exact))
    operations = count_operations(algorithm, shape, which)
    call = partial(run_conv, algorithm, shape, which, *operands)
    found, result = timer.time(algorithm.name, which, operations, call)
    error, work = error_of_conv(result, exact), work_of(algorithm, shape)
    depth = depth_of(algorithm, shape, which)
    return ConvTime(algorithm.name, layer, shape, which, found, error, work, operations, depth)


def measure_errors(
    device: torch.device, shape: ConvShape, which: ConvPass
) -> dict[str, dict[str, float | None]]:
    """By algorithm and precision; None where it does not run."""
    found = dict[str, dict[str, float | None]]()
    for precision, kind in PRECISIONS.items():
        first, second = make_operands(shape, which, kind, device)
        exact = library_conv(shape, which, first.double(), second.double())
        for algorithm in CONV_ALGORITHMS:
            found.setdefault(algorithm.name, {})[precision] = _error(
                algorithm, shape, which, (first, second), exact
            )
        result = library_conv(shape, which, first, second)
        found.setdefault(LIBRARY, {})[precision] = error_of_conv(result, exact)
    return found


def _error(
    algorithm: ConvAlgorithm,
    shape: ConvShape,
    which: ConvPass,
    operands: tuple[Tensor, Tensor],
    exact: Tensor,
) -> float | None:
    try:
        return error_of_conv(run_conv(algorithm, shape, which, *operands), exact)
    except LockstepError:
        return None


def make_operands(
    shape: ConvShape, which: ConvPass, precision: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """What a pass takes, drawn at random, always the same."""
    maker = torch.Generator(device=device).manual_seed(0)
    images, weight, results = (
        torch.randn(size, device=device, generator=maker).to(precision)
        for size in (shape.image_size, shape.weight_size, shape.result_size)
    )
    if which is ConvPass.FORWARD:
        return images, weight
    return (results, weight) if which is ConvPass.DATA else (images, results)


def library_conv(shape: ConvShape, which: ConvPass, first: Tensor, second: Tensor) -> Tensor:
    """The same pass by what torch calls."""
    window = shape.stride, shape.padding, shape.dilation, shape.groups
    if which is ConvPass.FORWARD:
        return functional.conv2d(first, second, None, *window)
    gradient: Any = grad
    found: Tensor = (
        gradient.conv2d_input(shape.image_size, second, first, *window)
        if which is ConvPass.DATA
        else gradient.conv2d_weight(first, shape.weight_size, second, *window)
    )
    return found


def error_of_conv(found: Tensor, exact: Tensor) -> float:
    """The largest error over the largest result."""
    return float((found.double() - exact).abs().max() / exact.abs().max())
