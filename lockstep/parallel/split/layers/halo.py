"""Rows of a result from rows of an image that several workers have: the inner ones while the halo travels.

Whoever has some rows computes them first as if they were a whole image. Only the first and the last of the
result are wrong then, where windows reach into the rows of others. These edges are computed again when the
halo has come, and take their place. No row is copied but those at the edges. Where rows are few this takes
longer than waiting, so there all are computed when the halo has come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.parallel.split.axes import SPATIAL, Axes
from lockstep.parallel.split.layers.row_buffer import RowParts
from lockstep.parallel.split.layers.window import common_rows

Compute = Callable[[Tensor, range, range], Tensor]  # (rows of the image, which these are, which to make)
Rows = Callable[[range], range]
EDGE_SHARE = 16  # of this worker's rows, at most one in so many is needed for an edge


@dataclass
class Halo:
    """One image and what is made of it, by every worker along `spatial`."""

    axes: Axes
    rows: int  # of the image
    made_rows: int  # of the result
    needs: Rows  # the rows of the image that rows of the result need
    frame: Rows  # the same with those outside the image, if they are to be written around
    is_like_image: bool  # whether this worker's rows can be taken for a whole image; a fixed rule

    @property
    def own(self) -> range:
        """This worker's rows of the image."""
        return self.axes.own_rows(self.rows)

    @property
    def made(self) -> range:
        """This worker's rows of the result."""
        return self.axes.own_rows(self.made_rows)

    @property
    def edges(self) -> list[range]:
        """The rows of the result that need rows of others: the first ones, and the last."""
        own, made = self.own, self.made
        first, last = made.start, made.stop
        while first < made.stop and self.needs(range(first, first + 1)).start < own.start:
            first += 1
        while last > first and self.needs(range(last - 1, last)).stop > own.stop:
            last -= 1
        return [edge for edge in (range(made.start, first), range(last, made.stop)) if edge]

    @property
    def has_inner_rows(self) -> bool:
        """Whether it pays to compute all rows first, and the edges again: a fixed rule."""
        needed = sum(len(self.needs(edge)) for edge in self.edges)
        return self.axes.spatial.size > 1 and self.is_like_image and EDGE_SHARE * needed <= len(self.own)

    def fetch(self, x: Tensor, meanwhile: Callable[[], None] = lambda: None) -> RowParts:
        """This worker's rows of the image and those that it needs of others; a collective."""
        own, have = self.own, self.axes.rows_of_all(self.rows)
        if self.axes.spatial.size == 1:
            meanwhile()
            return RowParts([own], [x])
        want = [
            self._outside(mine, self.needs(made))
            for (mine,), (made,) in zip(have, self.axes.rows_of_all(self.made_rows), strict=True)
        ]
        found = self.axes.move(SPATIAL, x, 2, have, want, meanwhile)
        before, after = want[self.axes.spatial.rank]
        tensors = [found[:, :, : len(before)], x, found[:, :, len(before) :]]
        return RowParts([before, own, after], tensors)

    def make(
        self,
        x: Tensor,
        compute: Compute,
        pieces: Sequence[range],
        inner_first: bool,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[Tensor, RowParts]:
        """This worker's rows of the result, and the rows that it had for them.

        Without `inner_first`, `pieces` are computed one after another when the halo is there.
        """
        early: list[Tensor] = []

        def work() -> None:
            if meanwhile:
                meanwhile()
            if inner_first and self.has_inner_rows:
                early.append(compute(x, range(len(self.own)), range(len(self.made))))

        parts = self.fetch(x, work)
        if not early:
            return _join([self._piece(parts, compute, piece) for piece in pieces]), parts
        (found,) = early
        for edge in self.edges:
            place = found.narrow(2, edge.start - self.made.start, len(edge))
            place.copy_(self._piece(parts, compute, edge))
        return found, parts

    def _piece(self, parts: RowParts, compute: Compute, piece: range) -> Tensor:
        if piece == range(self.made_rows):
            return compute(parts.take(range(self.rows)), range(self.rows), piece)
        at = self.frame(piece)
        return compute(parts.take(at), at, piece)

    def _outside(self, own: range, need: range) -> tuple[range, range]:
        """Needed rows before and after a worker's own."""
        return common_rows(need, range(own.start)), common_rows(need, range(own.stop, self.rows))


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 2)
