"""Blocks of several parameters as rows of one table, those that one worker sums beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.comm.compress.feedback import Feedback
from lockstep.spec.rule.compression import BLOCK, own_blocks


@dataclass(frozen=True)
class _Place:
    index: int  # of the parameter
    start: int  # its first block here
    stop: int
    row: int  # where that is


class BlockLayout:
    """The rows of some parameters of a Feedback, in the order of workers."""

    def __init__(self, feedback: Feedback, names: Sequence[str], workers: int) -> None:
        self.names, self.rank_rows = list(names), list[range]()
        number = {name: place for place, name in enumerate(feedback.shapes)}
        self._shapes = [feedback.shapes[name] for name in names]
        self._places, row = list[_Place](), 0
        for rank in range(workers):
            first = row
            for index, (name, shape) in enumerate(zip(names, self._shapes, strict=True)):
                count = -(-shape.numel() // BLOCK)
                own = own_blocks(count, number[name], workers, rank)
                if own:
                    self._places.append(_Place(index, own.start, own.stop, row))
                    row += len(own)
            self.rank_rows.append(range(first, row))
        self.num_rows = row

    def table(self, device: torch.device) -> Tensor:
        """A table of zeros; what is past the end of a parameter stays zero."""
        return torch.zeros(self.num_rows, BLOCK, device=device)

    def fill(self, table: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy parameters' elements, in their logical order, into the table."""
        flats = [tensor.contiguous().view(-1) for tensor in tensors]
        for place in self._places:
            source = flats[place.index][place.start * BLOCK : place.stop * BLOCK]
            table.view(-1)[place.row * BLOCK : place.row * BLOCK + len(source)] = source

    def read(self, table: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        """The parameters that a table holds, each with the memory format of its example."""
        found = [torch.empty(shape.numel(), device=table.device) for shape in self._shapes]
        for place in self._places:
            target = found[place.index][place.start * BLOCK : place.stop * BLOCK]
            target.copy_(table.view(-1)[place.row * BLOCK : place.row * BLOCK + len(target)])
        pairs = zip(found, like, strict=True)
        return [flat.view(p.shape) if p.is_contiguous() else _as(p, flat.view(p.shape)) for flat, p in pairs]

    def views(self, table: Tensor, blocks: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Rows of the table beside the blocks [N, BLOCK] of each parameter that they hold."""
        return [
            (table[p.row : p.row + p.stop - p.start], blocks[p.index][p.start : p.stop]) for p in self._places
        ]

    def own_views(self, rows: Tensor, rank: int, means: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """A worker's rows beside its blocks of the means."""
        own = self.rank_rows[rank]
        return [
            (rows[p.row - own.start : p.row - own.start + p.stop - p.start], means[p.index])
            for p in self._places
            if p.row in own
        ]


def _as(like: Tensor, values: Tensor) -> Tensor:
    return torch.empty_like(like).copy_(values)
