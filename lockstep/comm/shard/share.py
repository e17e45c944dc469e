"""One worker's share of the parameters of a model: flat tensors by block, and a view for each piece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from lockstep.comm.shard.shard_block import ShardBlock


class Share:
    """Share `number` of named tensors; `names` are those of each block, in its order.

    `aliases` are other names of some of them, as of a weight that two layers share.
    """

    def __init__(
        self,
        names: Sequence[Sequence[str]],
        blocks: Sequence[ShardBlock],
        number: int,
        flats: list[Tensor],
        aliases: Mapping[str, str],
    ) -> None:
        self.names, self.blocks, self.number, self.flats = names, blocks, number, flats
        shapes = {
            name: shape
            for own, block in zip(names, blocks, strict=True)
            for name, shape in zip(own, block.shapes, strict=True)
        }
        self.aliases = {alias: name for alias, name in aliases.items() if name in shapes}
        self.shapes = shapes | {alias: shapes[name] for alias, name in self.aliases.items()}

    @classmethod
    def cut(
        cls,
        names: Sequence[Sequence[str]],
        tensors: Mapping[str, Tensor],
        shares: int,
        number: int,
        aliases: Mapping[str, str] | None = None,
        cuts: Sequence[ShardBlock] = (),
    ) -> Share:
        """A share of tensors that this worker has whole, or reads block by block.

        Blocks are cut into even shares, or as `cuts` say.
        """
        blocks, flats = [], []
        for place, own in enumerate(names):
            whole = [tensors[name] for name in own]
            even = ShardBlock(tuple(tensor.shape for tensor in whole), shares)
            block = cuts[place] if cuts else even
            flat = torch.zeros(block.size(number), dtype=whole[0].dtype, device=whole[0].device)
            for piece in block.pieces(number):
                source = whole[piece.index].detach().reshape(-1)[piece.start : piece.stop]
                flat[piece.offset : piece.offset + len(source)] = source
            blocks.append(block)
            flats.append(flat)
        return cls(names, blocks, number, flats, aliases or {})

    @cached_property
    def starts(self) -> dict[str, int]:
        """Where the piece of each tensor of which there is one begins, in the order of names."""
        found = {
            own[piece.index]: piece.start
            for own, block in zip(self.names, self.blocks, strict=True)
            for piece in block.pieces(self.number)
        }
        return found | {alias: found[name] for alias, name in self.aliases.items() if name in found}

    @cached_property
    def pieces(self) -> dict[str, Tensor]:
        """The pieces, as views."""
        return {
            own[piece.index]: flat[piece.offset : piece.offset + piece.stop - piece.start]
            for own, block, flat in zip(self.names, self.blocks, self.flats, strict=True)
            for piece in block.pieces(self.number)
        }

    @property
    def other_pieces(self) -> dict[str, Tensor]:
        """The same pieces by their other names."""
        pairs = self.aliases.items()
        return {alias: self.pieces[name] for alias, name in pairs if name in self.pieces}

    def copy(self) -> Share:
        """Another share of the same values."""
        flats = [flat.clone() for flat in self.flats]
        return Share(self.names, self.blocks, self.number, flats, self.aliases)
