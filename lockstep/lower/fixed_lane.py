"""Runs one lane on fixed weights, images and labels: what the lane fingerprint and the probes compare.

Images, labels, weights and statistics are keyed by name. So they are the same on every worker, whatever
weights its model starts from. Zeros would hide differences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data.loader import Lanes
from lockstep.kernels import random
from lockstep.kernels.numerics import memory_format
from lockstep.lower.lane_by_lane import LaneByLane
from lockstep.models.tensors import buffers_kept
from lockstep.spec import Run

_PERIOD = 65537  # values after which a large tensor repeats them; a prime, so that no two rows are alike
_MOST_WORK = 2 << 30  # multiplications of a forward pass: well below a second on one core
_HALF_COST = 16  # times as much as fp32, on a CPU without half precision of its own
_FEW = 4096  # values: more are drawn for a whole period, which serves tensors of all sizes
_FEWEST = 2  # samples: a batch norm after a global pooling needs two


def run_fixed_lane(
    way: LaneByLane, images: Tensor, labels: Any, memory_format: torch.memory_format
) -> list[Tensor]:
    """Loss, logits, gradients and new floating buffers of a lane shaped as `images`.

    The model and torch's random generators are unchanged afterwards.
    """
    device = images.device
    fixed = torch.empty_like(images, memory_format=memory_format).copy_(fixed_values("images", images) * 4)
    lanes = Lanes(fixed, labels, 1)
    streams = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(streams), fixed_weights(way.model):
        (output,) = way.run(lanes, 0)
    return [output.loss, output.logits, *output.grads, *output.float_buffers]


def fixed_images(run: Run, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """A lane of fixed images, in the memory format of training."""
    empty = torch.empty(run.train.batch // run.train.lanes, *shape, device=device)
    fixed = empty.to(memory_format=memory_format(run))
    return fixed.copy_(fixed_values("images", fixed))


def fixed_labels(count: int, classes: int, device: torch.device) -> Tensor:
    """Fixed class numbers."""
    counter = torch.arange(count, device=device)
    return random.integers(random.key("together", "labels"), counter, classes)


@contextmanager
def fixed_weights(model: nn.Module) -> Iterator[None]:
    """Give a model fixed parameters and buffers inside the block, and its own again after it.

    Integer buffers that are not scalar counters keep their values, because they may be indices.
    """
    own: dict[str, Tensor] = {}
    try:
        with torch.no_grad():
            for name, tensor in _tensors(model):
                own[name] = tensor.clone()
                _fill(name, tensor, isinstance(tensor, nn.Parameter))
        yield
    finally:
        with torch.no_grad():
            for name, tensor in _tensors(model):  # look again: a module may have replaced a buffer
                if name in own:
                    tensor.copy_(own[name])


def fixed_values(name: str, like: Tensor) -> Tensor:
    """Fixed values in [−1, 1) of the shape of `like`."""
    count = like.numel()
    values = _draw_values(name, _PERIOD if count > _FEW else count, like.device)
    return values.repeat(-(-count // max(len(values), 1)))[:count].view(like.shape)


@lru_cache(maxsize=64)
def _draw_values(name: str, count: int, device: torch.device) -> Tensor:
    """The first values for tensors of a name; probes ask for the same ones many times."""
    counter = torch.arange(count, device=device)
    return random.symmetric(random.key("together", name), counter)


def fixed_samples(model: nn.Module, image: Tensor, lane_size: int, half: torch.dtype | None) -> int:
    """The number of samples that a CPU computes for a fixed lane, so that its work is bounded.

    It depends on shapes alone, because a time would differ between workers. `image` is one image.
    """
    work = sum(count_work(model, image).values()) * (_HALF_COST if half else 1)
    return min(lane_size, max(_FEWEST, _MOST_WORK // max(work, 1)))


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _fill(name: str, tensor: Tensor, is_parameter: bool) -> None:
    if tensor.is_floating_point() and tensor.numel():
        values = fixed_values(name, tensor)
        if is_parameter:
            tensor.copy_(values / math.prod(tensor.shape[1:]) ** 0.5)
        else:
            tensor.copy_(values * 0.25 + 0.75)  # a variance is not negative
    elif not tensor.is_floating_point() and not tensor.dim():
        tensor.zero_()  # a count


@torch.no_grad()
def count_work(model: nn.Module, image: Tensor) -> dict[str, int]:
    """Multiplications of every layer that has a matrix or a filter, for one image in eval mode."""
    found: dict[str, int] = {}

    def note(name: str, weights: Sequence[Tensor], layer: nn.Module, given: object, output: object) -> None:
        if isinstance(output, Tensor):
            work = sum(weight.numel() * (output.numel() // len(weight)) for weight in weights)
            found[name] = found.get(name, 0) + work

    handles = []
    for name, layer in model.named_modules():
        weights = [p for p in layer.parameters(recurse=False) if p.dim() > 1 and len(p)]
        if weights:
            handles.append(layer.register_forward_hook(partial(note, name, weights)))
    try:
        with buffers_kept(model):
            model.eval()(image)
    finally:
        for handle in handles:
            handle.remove()
    return found
