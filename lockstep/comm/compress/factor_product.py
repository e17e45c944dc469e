"""Products of a gradient, as a matrix, with thin factors: by C on a CPU with a compiler, else by torch.

C sums in one order on every processor, torch in its own: which of them runs is part of a run's identity.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.comm.compress.codec_library import call_codec


class TorchProducts:
    """matrix [rows, columns], p [rows, rank], q [columns, rank]."""

    def add_project(self, grad: Tensor, kept: Tensor, q: Tensor, matrix: Tensor) -> Tensor:
        """Write gradient + remembered to `matrix`; returns its product with `q`."""
        return torch.add(grad, kept, out=matrix) @ q

    def find_along(self, matrix: Tensor, p: Tensor) -> Tensor:
        """The transposed matrix times `p`."""
        return matrix.t() @ p

    def take_away(self, matrix: Tensor, p: Tensor, q: Tensor) -> None:
        """Leave of a matrix what it has beside p·qᵀ."""
        matrix.sub_(p @ q.t())  # in place: what another stream still reads is not given back

    def multiply(self, p: Tensor, q: Tensor, found: Tensor) -> None:
        """Write p·qᵀ."""
        torch.mm(p, q.t(), out=found)


class NativeProducts(TorchProducts):
    """The same, each in one pass over the matrix."""

    def add_project(self, grad: Tensor, kept: Tensor, q: Tensor, matrix: Tensor) -> Tensor:
        side = _widen(q).t().contiguous()
        found = torch.empty(len(matrix), len(side))
        call_codec("add_project", [*matrix.shape, len(side)], grad, kept, side, matrix, found)
        return found[:, : q.shape[1]].contiguous()

    def find_along(self, matrix: Tensor, p: Tensor) -> Tensor:
        wide = _widen(p)
        found = torch.empty(wide.shape[1], matrix.shape[1])
        call_codec("find_along", [*matrix.shape, wide.shape[1]], matrix, wide, found)
        return found[: p.shape[1]].t().contiguous()

    def take_away(self, matrix: Tensor, p: Tensor, q: Tensor) -> None:
        call_codec("multiply", [*matrix.shape, p.shape[1]], p, q.t().contiguous(), matrix, matrix)

    def multiply(self, p: Tensor, q: Tensor, found: Tensor) -> None:
        call_codec("multiply", [*found.shape, p.shape[1]], p, q.t().contiguous(), 0, found)


def _widen(factor: Tensor) -> Tensor:
    """With columns of zeros, to a multiple of 4."""
    return torch.nn.functional.pad(factor, (0, -factor.shape[1] % 4))
