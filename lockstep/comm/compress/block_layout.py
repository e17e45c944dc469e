"""Blocks of several parameters as rows of one table, those that one worker sums beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.comm.compress.feedback import Feedback
from lockstep.spec.rule.compression import BLOCK, own_blocks


@dataclass(frozen=True)
class BlockPlace:
    """Neighbouring blocks of a parameter in neighbouring rows."""

    index: int  # of the parameter
    start: int  # its first block here
    stop: int
    row: int  # where that is


class BlockLayout:
    """The rows of some parameters of a Feedback, in the order of workers."""

    def __init__(self, feedback: Feedback, names: Sequence[str], workers: int) -> None:
        self.names, self.rank_rows = list(names), list[range]()
        number = {name: place for place, name in enumerate(feedback.shapes)}
        self.shapes = [feedback.shapes[name] for name in names]
        self.places, row = list[BlockPlace](), 0
        for rank in range(workers):
            first = row
            for index, (name, shape) in enumerate(zip(names, self.shapes, strict=True)):
                count = -(-shape.numel() // BLOCK)
                own = own_blocks(count, number[name], workers, rank)
                if own:
                    self.places.append(BlockPlace(index, own.start, own.stop, row))
                    row += len(own)
            self.rank_rows.append(range(first, row))
        self.num_rows = row

    def table(self, device: torch.device) -> Tensor:
        """A table of zeros; what is past the end of a parameter stays zero."""
        return torch.zeros(self.num_rows, BLOCK, device=device)

    def fill(self, table: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy parameters' elements, in their logical order, into the table."""
        flats = [tensor.contiguous().view(-1) for tensor in tensors]
        for place in self.places:
            source = flats[place.index][place.start * BLOCK : place.stop * BLOCK]
            table.view(-1)[place.row * BLOCK : place.row * BLOCK + len(source)] = source

    def read(self, table: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        """The parameters that a table holds, each with the memory format of its example."""
        found = [torch.empty(shape.numel(), device=table.device) for shape in self.shapes]
        for place in self.places:
            target = found[place.index][place.start * BLOCK : place.stop * BLOCK]
            target.copy_(table.view(-1)[place.row * BLOCK : place.row * BLOCK + len(target)])
        return self.shaped(found, like)

    def shaped(self, found: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """Flat parameters with the shape and the memory format of an example each."""
        return [shape_as(p, flat) for flat, p in zip(found, like, strict=True)]

    def views(self, table: Tensor, blocks: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Rows of the table beside the blocks [N, BLOCK] of each parameter that they hold."""
        return [
            (table[p.row : p.row + p.stop - p.start], blocks[p.index][p.start : p.stop]) for p in self.places
        ]

    def own_places(self, rank: int) -> list[BlockPlace]:
        """Those that a worker sums."""
        return [place for place in self.places if place.row in self.rank_rows[rank]]

    def own_views(self, rows: Tensor, rank: int, means: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """A worker's rows beside its blocks of the means."""
        first, places = self.rank_rows[rank].start, self.own_places(rank)
        return [(rows[p.row - first : p.row - first + p.stop - p.start], means[p.index]) for p in places]


def shape_as(like: Tensor, found: Tensor) -> Tensor:
    """All elements of a parameter, in their logical order, with the memory format of an example."""
    found = found.view(like.shape)
    return found if like.is_contiguous() else torch.empty_like(like).copy_(found)
