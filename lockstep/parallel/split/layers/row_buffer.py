"""Rows of images in memory: taken from those at hand with zeros around, and put in their place.

Every result is without gaps and lies in memory as its source does, channels first or last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.parallel.split.layers.window import common_rows


@dataclass
class RowParts:
    """An image's rows in several tensors, from the first to the last: a worker's own, and its halo's."""

    ranges: list[range]
    tensors: list[Tensor]

    def take(self, rows: range, fill: float = 0.0) -> Tensor:
        """These rows in one tensor; those that none has are filled."""
        parts = list(zip(self.ranges, self.tensors, strict=True))
        for held, tensor in parts:
            if held.start <= rows.start and rows.stop <= held.stop:
                return dense_as(tensor.narrow(2, rows.start - held.start, len(rows)), tensor)
        like = max(self.tensors, key=torch.numel)
        found = empty_as((*like.shape[:2], len(rows), like.shape[3]), like)
        at = rows.start
        for held, tensor in parts:
            both = common_rows(held, rows)
            if both:
                found.narrow(2, at - rows.start, both.start - at).fill_(fill)
                place = found.narrow(2, both.start - rows.start, len(both))
                place.copy_(tensor.narrow(2, both.start - held.start, len(both)))
                at = both.stop
        found.narrow(2, at - rows.start, rows.stop - at).fill_(fill)
        return found


def take_rows(image: Tensor, held: range, rows: range) -> Tensor:
    """Rows of an image that has those of `held`; the others are zeros."""
    return image if held == rows else place_rows(image, held, rows, None)


def place_rows(image: Tensor, at: range, rows: range, fill: Tensor | None) -> Tensor:
    """An image's rows, which are those of `at`, among `rows`; the others are zeros, or a number a channel."""
    if at == rows:
        return image
    kept = common_rows(at, rows)
    part = image[:, :, kept.start - at.start : kept.stop - at.start] if kept else image[:, :, :0]
    if len(kept) == len(rows):
        return dense_as(part, image)
    found = empty_as((*image.shape[:2], len(rows), image.shape[3]), image)
    edges = (
        [found[:, :, : kept.start - rows.start], found[:, :, kept.stop - rows.start :]] if kept else [found]
    )
    for edge in edges:
        edge.copy_(fill[:, None, None]) if fill is not None else edge.zero_()
    if kept:
        found[:, :, kept.start - rows.start : kept.stop - rows.start] = part
    return found


def empty_as(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A tensor of any values that lies in memory as `like` does."""
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=_memory_format(like))


def dense_as(part: Tensor, like: Tensor) -> Tensor:
    """A part without gaps, in the memory format of `like`."""
    return part.contiguous(memory_format=_memory_format(like))


def is_channels_last(image: Tensor) -> bool:
    """Whether neighbours in memory are channels; with one channel, the strides still tell."""
    if image.dim() != 4 or image.stride(1) != 1:
        return False
    return image.stride(3) > 1 or image.shape[2] * image.shape[3] > 1


def _memory_format(image: Tensor) -> torch.memory_format:
    return torch.channels_last if is_channels_last(image) else torch.contiguous_format
