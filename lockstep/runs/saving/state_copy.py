"""A copy of what a worker has of a state, in host memory that is kept for the next copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lockstep.runs.state_parts import StatePiece


class StateCopy:
    """Host memory for one copy; taken anew it is overwritten, so whoever reads it must be done."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], Tensor] = {}

    @torch.no_grad()
    def take(self, own: Sequence[StatePiece]) -> list[StatePiece]:
        """Copy pieces in logical order; the steps that changed them are over when it returns."""
        before, self._kept = self._kept, {}
        for piece in own:
            place, tensor = (piece.name, piece.start), piece.tensor.detach()
            known = before.get(place)
            if known is None or (known.shape, known.dtype) != (tensor.shape, tensor.dtype):
                known = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._kept[place] = known.copy_(tensor)
        return [replace(piece, tensor=self._kept[piece.name, piece.start]) for piece in own]

    @property
    def num_bytes(self) -> int:
        """The memory of the last copy."""
        return sum(tensor.nbytes for tensor in self._kept.values())
