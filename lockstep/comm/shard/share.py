"""One worker's share of the parameters of a model: flat tensors by block, and a view for each piece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from lockstep.comm.shard.shard_block import ShardBlock


class Share:
    """Share `number` of named tensors; `names` are those of each block, in its order."""

    def __init__(
        self, names: Sequence[Sequence[str]], blocks: Sequence[ShardBlock], number: int, flats: list[Tensor]
    ) -> None:
        self.names, self.blocks, self.number, self.flats = names, blocks, number, flats
        self.shapes = {
            name: shape
            for own, block in zip(names, blocks, strict=True)
            for name, shape in zip(own, block.shapes, strict=True)
        }

    @classmethod
    def cut(
        cls, names: Sequence[Sequence[str]], tensors: Mapping[str, Tensor], shares: int, number: int
    ) -> Share:
        """A share of tensors that this worker has whole, or reads block by block."""
        blocks, flats = [], []
        for own in names:
            whole = [tensors[name] for name in own]
            block = ShardBlock(tuple(tensor.shape for tensor in whole), shares)
            flat = torch.zeros(block.size(number), dtype=whole[0].dtype, device=whole[0].device)
            for piece in block.pieces(number):
                source = whole[piece.index].detach().reshape(-1)[piece.start : piece.stop]
                flat[piece.offset : piece.offset + len(source)] = source
            blocks.append(block)
            flats.append(flat)
        return cls(names, blocks, number, flats)

    @cached_property
    def starts(self) -> dict[str, int]:
        """Where the piece of each tensor of which there is one begins, in the order of names."""
        return {
            own[piece.index]: piece.start
            for own, block in zip(self.names, self.blocks, strict=True)
            for piece in block.pieces(self.number)
        }

    @cached_property
    def pieces(self) -> dict[str, Tensor]:
        """The pieces, as views."""
        return {
            own[piece.index]: flat[piece.offset : piece.offset + piece.stop - piece.start]
            for own, block, flat in zip(self.names, self.blocks, self.flats, strict=True)
            for piece in block.pieces(self.number)
        }

    def copy(self) -> Share:
        """Another share of the same values."""
        return Share(self.names, self.blocks, self.number, [flat.clone() for flat in self.flats])
