"""A bucket whose gradients travel as two thin matrices: what all lanes have in common, by fixed trees.

A gradient M, as a matrix, is projected to the directions Q that were found last: P = M·Q, summed over lanes
and made orthogonal. What each lane has along P, Mᵀ·P, is summed again, and is the next Q. The mean gradient
is P·Qᵀ. What a lane has beside P it remembers, and adds to its next gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.comm.bucket import ReducedTensor
from lockstep.comm.compress.block_layout import shape_as
from lockstep.comm.compress.codec_library import compresses_by
from lockstep.comm.compress.factor_product import NativeProducts, TorchProducts
from lockstep.comm.compress.feedback import Feedback
from lockstep.comm.compress.feedback_bucket import FeedbackBucket
from lockstep.comm.compress.unfinished_feedback import UnfinishedFeedback
from lockstep.comm.exchange import ExchangeShape, exchange_over
from lockstep.comm.group import Group
from lockstep.comm.tree import LaneTree, Leaf, all_heights, tree_sum

_LEAST = 1e-6  # what is left of a direction beside those before it; less is rounding


class LowRankBucket(FeedbackBucket):
    """Entries that are exchanged as factors of a fixed rank."""

    def __init__(
        self,
        group: Group,
        lanes: int,
        entries: list[ReducedTensor],
        indices: list[int],
        feedback: Feedback,
    ) -> None:
        super().__init__(group, lanes, entries, indices, feedback)
        self._left_over = UnfinishedFeedback()
        self._first = {name: feedback.first_factor(name) for name in self._names}
        self._products = NativeProducts() if compresses_by(self._device) == "c" else TorchProducts()
        like = [entry.like for entry in entries]
        self._means = [torch.empty(len(p), p.numel() // len(p), device=self._device) for p in like]

    def _prepare(self, group: Group, lanes: int) -> None:
        """Room for what travels: P, and then Q."""
        rank, shapes = self._feedback.compression.rank, [entry.like.shape for entry in self._entries]
        sides = [s[0] for s in shapes], [s.numel() // s[0] for s in shapes]
        self._exchanges = [
            _Factors(group, lanes, [(size, rank) for size in sizes], self._device) for sizes in sides
        ]
        self.sent_bytes = sum(each.sent_bytes for each in self._exchanges)

    def begin(self) -> None:
        super().begin()
        self._matrices: dict[int, Leaf] = {}  # by lane: its gradients, then what is not along P

    def _add_lane(self, lane: int, grads: list[Tensor]) -> None:
        kept, found, projected = self._feedback.lanes[lane], Leaf(), Leaf()
        room = self._left_over.beside(lane, kept, self._names)
        for name, grad in zip(self._names, grads, strict=True):
            flat = grad.contiguous().view(len(grad), -1)
            before, matrix = (each[name].view(-1)[: flat.numel()].view(flat.shape) for each in (kept, room))
            projected.append(self._products.add_project(flat, before, self._feedback.factors[name], matrix))
            found.append(matrix)
        self._matrices[lane] = found
        self._tree.add(projected)

    def _exchange_means(self) -> Leaf:
        """The means of all lanes, of the rank that travels."""
        products, common = self._products, [make_orthogonal(p) for p in self._mean(self._tree, 0)]
        tree = LaneTree(self._own.start)
        for matrices in self._matrices.values():
            own = [products.find_along(m, p) for m, p in zip(matrices, common, strict=True)]
            for m, p, q in zip(matrices, common, own, strict=True):
                products.take_away(m, p, q)
            tree.add(own)
        self._next = self._mean(tree, 1)
        for mean, p, q in zip(self._means, common, self._next, strict=True):
            products.multiply(p, q, mean)
        return [shape_as(entry.like, mean) for entry, mean in zip(self._entries, self._means, strict=True)]

    def _mean(self, tree: LaneTree, number: int) -> Leaf:
        return tree.mean() if self._alone else self._exchanges[number].mean(tree)

    @torch.no_grad()
    def commit(self, bad: Tensor | None) -> None:
        for name, factor in zip(self._names, self._next, strict=True):
            # where a direction has come to nothing it begins anew
            found = torch.where(factor.any(0), factor, self._first[name])
            kept = self._feedback.factors[name]
            kept.copy_(found if bad is None else torch.where(bad, kept, found))
        self._left_over.commit(bad)


class _Factors:
    """The exchange of a list of thin matrices."""

    def __init__(self, group: Group, lanes: int, shapes: list[tuple[int, int]], device: torch.device) -> None:
        self._shapes, length = shapes, sum(rows * columns for rows, columns in shapes)
        shape = ExchangeShape(all_heights(lanes, group.size), length, torch.float32, None, device)
        self._exchange = exchange_over(group, shape)
        others = group.size - 1
        self.sent_bytes = 4 * shape.slice * others * (len(shape.heights[group.rank]) + 1)

    def mean(self, tree: LaneTree) -> Leaf:
        """The mean over all lanes of all workers."""
        for room, (_, _, tensors) in zip(self._exchange.roots, tree.roots(), strict=True):
            self._write(room, tensors)
        self._exchange.run()
        found, first = Leaf(), 0
        for rows, columns in self._shapes:  # each in memory of its own, as products may go by alignment
            found.append(self._exchange.result[first : first + rows * columns].view(rows, columns).clone())
            first += rows * columns
        return found

    def _write(self, room: Tensor, tensors: Leaf) -> None:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        room[: len(flat)] = flat


def make_orthogonal(matrix: Tensor) -> Tensor:
    """Columns of norm 1 at right angles, one after another; sums by trees, the same on every worker."""
    columns = list[Tensor]()
    for each in matrix.t().double().contiguous():
        column, whole = each.clone(), tree_sum(each * each).sqrt()
        for before in columns:
            column -= before * tree_sum(before * column)
        norm = tree_sum(column * column).sqrt()
        columns.append(torch.where(norm > _LEAST * whole, column / norm, 0.0))
    return torch.stack(columns).t().float().contiguous()
