"""Codecs in PyTorch: blocks of fp32 become rows of bytes, all of one length, and come back.

`c/codec.c` has the same; rows of either may be read by the other, and say the same numbers.

What a block becomes depends on its own elements only. So a codec gives the same bytes wherever its block is
computed, and however many others are computed with it.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lockstep.spec.rule.compression import BLOCK, Compression


class Codec(Protocol):
    """Blocks [N, BLOCK] in fp32 ↔ rows of bytes, `Compression.row_bytes` each."""

    def encode(self, blocks: Tensor) -> Tensor: ...
    def decode(self, rows: Tensor) -> Tensor: ...


def make_codec(compression: Compression) -> Codec:
    """The codec of a kind that compresses block by block."""
    if compression.kind == "top":
        return TopCodec(compression.count)
    if compression.kind == "bf16":
        return Bf16Codec()
    if compression.kind == "fp8":
        return ScaledCodec(torch.float8_e4m3fn, 448.0)
    return ScaledCodec(torch.int8, 127.0)


class Bf16Codec:
    """Every element rounded to bf16."""

    def encode(self, blocks: Tensor) -> Tensor:
        return blocks.to(torch.bfloat16).view(torch.uint8)

    def decode(self, rows: Tensor) -> Tensor:
        return rows.view(torch.bfloat16).float()


class ScaledCodec:
    """A scale for each block, by which its largest element becomes the type's largest number."""

    def __init__(self, kind: torch.dtype, largest: float) -> None:
        self._kind, self._largest = kind, largest

    def encode(self, blocks: Tensor) -> Tensor:
        # by a tensor: a GPU would multiply by the reciprocal of a plain number
        scale = blocks.abs().amax(1, keepdim=True) / torch.full_like(blocks[:1, :1], self._largest)
        found = blocks / torch.where(scale == 0, 1.0, scale)
        found = found.round() if self._kind == torch.int8 else found
        found.clamp_(-self._largest, self._largest)  # a scale that is hardly above zero is too small
        return torch.cat([scale.view(torch.uint8), found.to(self._kind).view(torch.uint8)], 1)

    def decode(self, rows: Tensor) -> Tensor:
        return _numbers(rows[:, 4:], self._kind).float() * _numbers(rows[:, :4], torch.float32)


class TopCodec:
    """The largest elements of each block, with their places; of equal ones those that come first."""

    def __init__(self, count: int) -> None:
        self._count = count

    def encode(self, blocks: Tensor) -> Tensor:
        places = self._places(blocks)
        values = blocks.gather(1, places)
        return torch.cat([places.to(torch.int16).view(torch.uint8), values.view(torch.uint8)], 1)

    def decode(self, rows: Tensor) -> Tensor:
        places = _numbers(rows[:, : 2 * self._count], torch.int16).long()
        values = _numbers(rows[:, 2 * self._count :], torch.float32)
        return torch.zeros(len(rows), BLOCK, device=rows.device).scatter_(1, places, values)

    def _places(self, blocks: Tensor) -> Tensor:
        """[N, count]: by size, then from the first on, so that no two elements are equal."""
        sizes = blocks.view(torch.int32).bitwise_and(0x7FFFFFFF).long()
        order = torch.arange(BLOCK - 1, -1, -1, device=blocks.device)
        return sizes.mul_(BLOCK).add_(order).topk(self._count, dim=1, sorted=False).indices


def _numbers(columns: Tensor, kind: torch.dtype) -> Tensor:
    """Bytes as numbers; copied, since these must begin at a multiple of their size."""
    return columns.clone(memory_format=torch.contiguous_format).view(kind)
