"""What compression left out, to be added to the next gradients: of lanes and blocks, not of workers.

A lane remembers what its own gradient lost; the owner of some blocks of the mean what they lost. Both count
from each parameter's first element. So another number of workers has the same memory, in other places.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lockstep.comm.group import Group
from lockstep.comm.tree import worker_lanes
from lockstep.spec import Train
from lockstep.spec.rule.compression import BLOCK, Compression, own_blocks, read_compression


@dataclass(frozen=True)
class FeedbackPiece:
    """Elements of a remembered tensor from `start` on, flat."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    start: int
    tensor: Tensor


def count_blocks(shape: torch.Size) -> int:
    """Blocks of a parameter; the last one may be short."""
    return -(-shape.numel() // BLOCK)


class Feedback:
    """This worker's part of the memory: of its lanes whole, of means the blocks that it sums."""

    def __init__(
        self, compression: Compression, params: Mapping[str, Tensor], lanes: int, group: Group
    ) -> None:
        self.compression = compression
        fp32 = {name: p for name, p in params.items() if p.dtype == torch.float32}
        taken = {name: p for name, p in fp32.items() if compression.takes(p.shape)}
        self.shapes = {name: p.shape for name, p in taken.items()}
        self.own = worker_lanes(lanes, group.size, group.rank)
        self.blocks = {
            name: own_blocks(count_blocks(shape), index, group.size, group.rank)
            for index, (name, shape) in enumerate(self.shapes.items())
        }
        self.lanes = {
            lane: {name: _blocks(p, count_blocks(p.shape)) for name, p in taken.items()} for lane in self.own
        }
        by_rank = bool(compression.rank)
        self.means = {} if by_rank else {n: _blocks(p, len(self.blocks[n])) for n, p in taken.items()}
        self._device = next((p.device for p in taken.values()), torch.device("cpu"))
        self.factors = {name: self.first_factor(name) for name in taken} if by_rank else {}

    @classmethod
    def of(cls, train: Train, model: nn.Module, group: Group) -> Feedback | None:
        """What a model's gradients need; None if they are not compressed."""
        compression = read_compression(train.compress)
        params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        return cls(compression, params, train.lanes, group) if compression else None

    def first_factor(self, name: str) -> Tensor:
        """[columns, rank]: where the search for a parameter's largest directions begins."""
        shape, key = self.shapes[name], hashlib.sha256(name.encode()).digest()[:7]
        maker = torch.Generator().manual_seed(int.from_bytes(key, "little"))
        columns = shape.numel() // shape[0]
        return torch.randn(columns, self.compression.rank, generator=maker).to(self._device)

    def pieces(self) -> Iterator[FeedbackPiece]:
        """All of it, as pieces of tensors that are named by lane and parameter."""
        for lane, tensors in self.lanes.items():
            for name, blocks in tensors.items():
                size = self.shapes[name].numel()
                yield FeedbackPiece(f"feedback.lane{lane:05}.{name}", (size,), 0, blocks.view(-1)[:size])
        for name, blocks in self.means.items():
            size, start = self.shapes[name].numel(), self.blocks[name].start * BLOCK
            if len(blocks):
                tensor = blocks.view(-1)[: size - start]
                yield FeedbackPiece(f"feedback.mean.{name}", (size,), start, tensor)
        for name, factor in self.factors.items():
            yield FeedbackPiece(f"feedback.factor.{name}", tuple(factor.shape), 0, factor)


def _blocks(like: Tensor, count: int) -> Tensor:
    return torch.zeros(count, BLOCK, device=like.device)
