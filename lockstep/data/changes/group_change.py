"""Applies different operations to different samples of a batch: sorts them by operation, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.kernels.structure import place

Operation = Callable[[Tensor, Tensor], Tensor]
GroupChange = tuple[Operation, Tensor] | None
_PIECE = 1 << 18  # pixels of a piece on a CPU, so that what an operation makes of them stays in the cache


def change_groups(images: Tensor, groups: Tensor, changes: Sequence[GroupChange]) -> Tensor:
    """Change each image by the operation of its group, an index into `changes`; None leaves images alone.

    Beside an operation stand its values for all samples; it is called with images and their values.
    """
    device = images.device
    order = groups.argsort(stable=True)
    sizes = groups.bincount(minlength=len(changes)).tolist()
    most = len(images) if images.is_cuda else max(_PIECE // images[0].numel(), 1)
    changed = images.index_select(0, place(order, device))
    for change, part, rows in zip(
        changes, torch.split(changed, sizes), torch.split(order, sizes), strict=True
    ):
        if change is not None and len(rows):
            operation, values = change
            for piece, few in zip(torch.split(part, most), torch.split(rows, most), strict=True):
                piece.copy_(operation(piece, place(values[few], device)))
    return changed.index_select(0, place(order.argsort(), device))
