"""A lane's gradients made whole: partial sums over bands are added up, own channels are gathered.

All tensors go in one message each way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from lockstep.lower.layer_split import GRADIENTS
from lockstep.parallel.split.axes import CHANNEL, SPATIAL, Axes
from lockstep.parallel.split.spread import Ranges


@dataclass(frozen=True)
class GradientPart:
    """What a worker has of a parameter's gradient."""

    is_sum: bool = False  # over its bands only
    dim: int = 0
    channels: tuple[Ranges, ...] = ()  # along `dim`, of each worker; zero for others'. Empty: all


def make_whole(
    axes: Axes, grads: Mapping[str, Tensor], parts: Mapping[str, GradientPart]
) -> dict[str, Tensor]:
    """The gradients of these parameters, whole on every worker; a collective along both axes."""
    axes = axes.of_layer(GRADIENTS)
    own = {name: _own(axes, grads[name], part) for name, part in parts.items()}
    sums = [name for name, part in parts.items() if part.is_sum]
    if sums and axes.spatial.size > 1:
        flat = torch.cat([own[name].reshape(-1) for name in sums])
        total = axes.sum_large(SPATIAL, flat, axes.bands)
        own |= dict(zip(sums, _split(total, [own[name].shape for name in sums]), strict=True))
    cut = [name for name, part in parts.items() if part.channels]
    if cut and axes.channel.size > 1:
        own |= _gather(axes, {name: own[name] for name in cut}, parts)
    return {**grads, **own}


def _own(axes: Axes, grad: Tensor, part: GradientPart) -> Tensor:
    if not part.channels:
        return grad
    (own,) = part.channels[axes.channel.rank]
    return grad.narrow(part.dim, own.start, len(own))


def _gather(axes: Axes, own: Mapping[str, Tensor], parts: Mapping[str, GradientPart]) -> dict[str, Tensor]:
    """Every worker's channels of some tensors."""
    size = axes.channel.size
    shapes = [[_shape(own[name], parts[name], worker) for name in own] for worker in range(size)]
    ends = list(accumulate((sum(shape.numel() for shape in every) for every in shapes), initial=0))
    have = [(range(*ends),) for ends in pairwise(ends)]
    flat = torch.cat([tensor.reshape(-1) for tensor in own.values()])
    every = axes.move(CHANNEL, flat, 0, have, [(range(ends[-1]),)] * size)
    found = [_split(every[first:last], shapes[w]) for w, (first, last) in enumerate(pairwise(ends))]
    return {
        name: torch.cat([found[w][i] for w in range(size)], parts[name].dim) for i, name in enumerate(own)
    }


def _shape(tensor: Tensor, part: GradientPart, worker: int) -> torch.Size:
    shape = list(tensor.shape)
    shape[part.dim] = len(part.channels[worker][0])
    return torch.Size(shape)


def _split(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    ends = list(accumulate((shape.numel() for shape in shapes), initial=0))
    return [flat[first:last].view(shape) for (first, last), shape in zip(pairwise(ends), shapes, strict=True)]
