"""The part of a product that this worker computes, if several share it; for `custom_op.py`.

A custom op takes plain numbers only, so the parts of a layer's products are known by a number, its `place`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import Tensor

_WHOLE = 0  # the place of a layer whose products every worker computes
_numbers = count(_WHOLE + 1)


@dataclass(frozen=True)
class ProductCut:
    """Some channels of a product's result: of its output, of its input's gradient, of its weight's."""

    channels: int
    own: range
    fill: Callable[[Tensor, int], None]  # fills in what other workers have along a dimension

    def part(self, tensor: Tensor, dim: int) -> Tensor:
        """This worker's channels."""
        return tensor.narrow(dim, self.own.start, len(self.own))

    def whole(self, part: Tensor, dim: int) -> Tensor:
        """The channels of all workers; images and filters channels last."""
        form = torch.channels_last if part.dim() == 4 else torch.contiguous_format
        shape = [self.channels if at == dim else size for at, size in enumerate(part.shape)]
        found = torch.empty(shape, dtype=part.dtype, device=part.device, memory_format=form)
        self.part(found, dim).copy_(part)
        self.fill(found, dim)
        return found


class LayerCuts:
    """The parts of a layer's products: of `forward`, `input_grad` and `weight_grad` those that are cut."""

    def __init__(self, cuts: Mapping[str, ProductCut]) -> None:
        self.cuts, self.place = dict(cuts), next(_numbers)
        _known[self.place] = self


_known: WeakValueDictionary[int, LayerCuts] = WeakValueDictionary()


def find_cut(place: int, operation: str) -> ProductCut | None:
    """This worker's part of a product; None if it computes all of it."""
    return None if place == _WHOLE else _known[place].cuts.get(operation)
