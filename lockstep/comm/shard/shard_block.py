"""A block: tensors in one flat buffer, cut into shares.

Shares are cut at multiples of 2¹⁶ elements of a tensor, as they count in its logical order. So sums over such
chunks, by which gradients are clipped, need one worker each. For optimizers that look at a whole parameter
they are cut where a tensor begins.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

CHUNK = 1 << 16
_ALIGN = 16  # elements: 64 bytes of fp32, since kernels may choose other algorithms by alignment


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `stop` of a tensor, which begin at `offset` in a share."""

    index: int  # of the tensor in its block
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class ShardBlock:
    """Tensors of these shapes, one after another, in so many shares."""

    shapes: tuple[torch.Size, ...]
    num_shares: int
    whole: bool = False  # whether no tensor is cut

    @cached_property
    def starts(self) -> list[int]:
        """Where each tensor begins, and the end of the block."""
        found = [0]
        for shape in self.shapes:
            found.append(found[-1] + -(-shape.numel() // _ALIGN) * _ALIGN)
        return found

    @property
    def length(self) -> int:
        """Elements of the flat buffer."""
        return self.starts[-1]

    @cached_property
    def bounds(self) -> list[int]:
        """Where each share begins, and the end: of all places allowed, the nearest to equal ones."""
        places = sorted(
            {
                start + first
                for start, shape in zip(self.starts, self.shapes, strict=False)
                for first in ((0,) if self.whole else _firsts(shape))
            }
        )
        places.append(self.length)
        found = [0]
        for number in range(1, self.num_shares):
            wanted = self.length * number / self.num_shares
            at = bisect_left(places, wanted)
            near = [places[i] for i in (at - 1, at) if 0 <= i < len(places)]
            found.append(max(found[-1], min(near, key=lambda place: (abs(place - wanted), place))))
        return [*found, self.length]

    def share(self, number: int) -> slice:
        """The elements of the flat buffer that are in a share."""
        return slice(self.bounds[number], self.bounds[number + 1])

    def size(self, number: int) -> int:
        """How many these are."""
        return self.bounds[number + 1] - self.bounds[number]

    def pieces(self, number: int) -> list[Piece]:
        """The pieces of tensors that a share holds."""
        share, found = self.share(number), []
        for index, (first, shape) in enumerate(zip(self.starts, self.shapes, strict=False)):
            start, stop = max(share.start, first), min(share.stop, first + shape.numel())
            if start < stop:
                found.append(Piece(index, start - first, stop - first, start - share.start))
        return found

    def fill(self, flat: Tensor, tensors: list[Tensor]) -> Tensor:
        """Copy tensors into a flat buffer, in their logical order."""
        for place, tensor in zip(self.views(flat), tensors, strict=True):
            place.copy_(tensor)
        return flat

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors in a flat buffer."""
        pairs = zip(self.starts, self.shapes, strict=False)
        return [flat[first : first + shape.numel()].view(shape) for first, shape in pairs]


def _firsts(shape: torch.Size) -> range:
    return range(0, max(shape.numel(), 1), CHUNK)
