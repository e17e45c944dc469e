"""One worker's place along `channel` and `spatial`: what is its own, and what it exchanges with others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lockstep.comm.group import Group
from lockstep.comm.tree import LaneTree
from lockstep.parallel.split.layer_clock import LayerClock
from lockstep.parallel.split.layers.row_buffer import empty_as
from lockstep.parallel.split.layers.window import common_rows
from lockstep.parallel.split.overlap import exchange_beside
from lockstep.parallel.split.spread import (
    Ranges,
    Spread,
    count,
    deal_grid,
    deal_subtrees,
    even_ranges,
    every_share,
    take,
)

CHANNEL, SPATIAL = "channel", "spatial"


@dataclass
class Axes:
    """The workers that share a lane, and the grid that sums follow."""

    bands: int = 1
    slices: int = 1
    channel: Group = field(default_factory=Group)
    spatial: Group = field(default_factory=Group)
    layer: str = ""  # whose exchanges these are; every call has axes of its own
    clock: LayerClock = field(default_factory=LayerClock)  # shared by all of them

    def __post_init__(self) -> None:
        self.bands_of_all = deal_subtrees(self.bands, self.spatial.size)

    def group(self, axis: str) -> Group:
        """The workers along an axis."""
        return self.channel if axis == CHANNEL else self.spatial

    @classmethod
    def planned(cls, bands: int, slices: int, channel: int, spatial: int) -> Axes:
        """So many workers, none of whom is there: enough to choose how layers are dealt out."""
        over_channels, over_rows = Group(), Group()
        over_channels.size, over_rows.size = channel, spatial
        return cls(bands, slices, over_channels, over_rows)

    def of_layer(self, layer: str) -> Axes:
        """The same workers, for the exchanges of one layer."""
        return replace(self, layer=layer)

    @property
    def is_one_worker(self) -> bool:
        """Whether nobody shares the lane."""
        return self.channel.size == self.spatial.size == 1

    def alone(self) -> Axes:
        """The same grid with one worker."""
        return Axes(self.bands, self.slices)

    def is_alone(self, spread: Spread) -> bool:
        """Whether nobody else has a part of a value."""
        return not spread.channels and (not spread.rows or self.spatial.size == 1)

    def rows_of_all(self, rows: int) -> list[Ranges]:
        """The rows of every worker along `spatial`."""
        return [(own,) for own in deal_grid(even_ranges(rows, self.bands), self.spatial.size)]

    def own_rows(self, rows: int) -> range:
        """This worker's rows."""
        return self.rows_of_all(rows)[self.spatial.rank][0]

    def own_bands(self, rows: int) -> list[range]:
        """The rows of each of this worker's bands."""
        own = self.bands_of_all[self.spatial.rank]
        return even_ranges(rows, self.bands)[own.start : own.stop]

    def dealt_rows(self, rows: int) -> list[range]:
        """The rows of every worker under every number of workers: a plan has one of these cuts."""
        return every_share(even_ranges(rows, self.bands))

    def channels_of_all(self, channels: int) -> tuple[Ranges, ...]:
        """The channels of every worker along `channel`; empty if there are fewer channels than workers."""
        size, edges = self.channel.size, self.slices_of(channels)
        if size == 1 or channels < size:
            return ()
        if len(edges) < size:
            return tuple((own,) for own in even_ranges(channels, size))
        return tuple((own,) for own in deal_grid(edges, size))

    def slices_of(self, channels: int) -> list[range]:
        """The channels of each slice; without a grid of slices, or with fewer channels, one slice."""
        return even_ranges(channels, self.slices if channels >= self.slices else 1)

    def slices_in(self, own: range, channels: int) -> list[range]:
        """The slices of so many channels that a worker's range consists of."""
        return [one for one in self.slices_of(channels) if own.start <= one.start < own.stop]

    def dealt_channels(self, channels: int) -> list[range]:
        """The channels of every worker under every number of workers; none if there is one slice."""
        return every_share(self.slices_of(channels))

    def own_part(self, tensor: Tensor, spread: Spread) -> Tensor:
        """This worker's part of a whole value."""
        if spread.rows:
            own = self.own_rows(spread.rows)
            tensor = tensor.narrow(2, own.start, len(own))
        if spread.channels:
            tensor = take(tensor, 1, spread.channels[self.channel.rank])
        return tensor

    def whole(self, tensor: Tensor, spread: Spread) -> Tensor:
        """All of a value of which every worker has its part."""
        return self.all_channels(self.all_rows(tensor, spread), spread)

    def all_rows(self, tensor: Tensor, spread: Spread) -> Tensor:
        """All rows of this worker's channels."""
        if not spread.rows or self.spatial.size == 1:
            return tensor
        wanted = [(range(spread.rows),)] * self.spatial.size
        return self.move(SPATIAL, tensor, 2, self.rows_of_all(spread.rows), wanted)

    def all_channels(self, tensor: Tensor, spread: Spread) -> Tensor:
        """All channels of this worker's rows."""
        if not spread.channels:
            return tensor
        every = range(sum(map(count, spread.channels)))
        return self.move(CHANNEL, tensor, 1, spread.channels, [(every,)] * self.channel.size)

    def move(
        self,
        axis: str,
        tensor: Tensor,
        dim: int,
        have: Sequence[Ranges],
        want: Sequence[Ranges],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """What this worker wants along a dimension, of what all workers along an axis have.

        What one has, no other has. Every worker calls it with the same `have` and `want`. Of what is in host
        memory, `meanwhile` runs while it travels.
        """
        group = self.group(axis)
        own, wanted = have[group.rank], want[group.rank]
        if group.size == 1 and own == wanted:
            meanwhile()
            return tensor
        sent = [_shared(own, want[peer]) if peer != group.rank else [] for peer in range(group.size)]
        received = [_shared(have[peer], wanted) if peer != group.rank else [] for peer in range(group.size)]
        pieces = [tensor.narrow(dim, at, n).reshape(-1) for found in sent for at, _, n in found]
        shape = list(tensor.shape)
        row = math.prod(shape[:dim] + shape[dim + 1 :])
        counts = [[row * sum(n for *_, n in found) for found in every] for every in (received, sent)]
        start = time.perf_counter()
        arrived = tensor.new_empty(sum(counts[0]))
        leaving = torch.cat(pieces) if pieces else tensor.new_empty(0)
        pairs = [(one, other) for one in range(group.size) for other in range(group.size) if one != other]
        if any(_shared(have[one], want[other]) for one, other in pairs):  # the same on every worker
            start += exchange_beside(group, (arrived, counts[0]), (leaving, counts[1]), meanwhile)
            self._note(axis, leaving.numel() * leaving.element_size(), start)
        else:
            meanwhile()
        shape[dim] = count(wanted)
        output = empty_as(tuple(shape), tensor)
        for at, to, n in _shared(own, wanted):
            output.narrow(dim, to, n).copy_(tensor.narrow(dim, at, n))
        first = 0
        for _, to, n in (place for found in received for place in found):
            shape[dim] = n
            output.narrow(dim, to, n).copy_(arrived[first : first + n * row].view(shape))
            first += n * row
        return output

    def sum_small(self, tensor: Tensor) -> Tensor:
        """The sum over all bands, by their tree, of what each worker summed over its own."""
        return self._sum(SPATIAL, self.gather_small(tensor))

    def gather_small(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all workers along `spatial`."""
        group = self.spatial
        if group.size == 1:
            return [tensor]
        start = time.perf_counter()
        found = tensor.new_empty(group.size, *tensor.shape)
        group.all_gather(found, tensor.contiguous())
        self._note(SPATIAL, tensor.numel() * tensor.element_size() * (group.size - 1), start)
        return list(found.unbind())

    def sum_large(self, axis: str, flat: Tensor, leaves: int) -> Tensor:
        """The same for a flat tensor: each worker sums a part, and all gather the parts."""
        group = self.group(axis)
        if group.size == 1 or not flat.numel():
            return flat
        start, parts = time.perf_counter(), even_ranges(flat.numel(), group.size)
        own = parts[group.rank]
        arrived = flat.new_empty(group.size * len(own))
        group.all_to_all(arrived, flat, [len(own)] * group.size, list(map(len, parts)))
        total = self._sum(axis, list(arrived.view(group.size, -1).unbind()), leaves)
        found = torch.empty_like(flat)
        counts = list(map(len, parts)), [len(own)] * group.size
        group.all_to_all(found, total.repeat(group.size), *counts)
        self._note(axis, 2 * (flat.numel() - len(own)) * flat.element_size(), start)
        return found

    def _sum(self, axis: str, rows: list[Tensor], leaves: int = 0) -> Tensor:
        tree = LaneTree()
        for own, row in zip(deal_subtrees(leaves or self.bands, self.group(axis).size), rows, strict=True):
            tree.add([row], len(own).bit_length() - 1)
        return tree.root()[1][0]

    def _note(self, axis: str, num_bytes: int, start: float) -> None:
        self.clock.sent(axis, self.layer, num_bytes, start)


def sum_leaves(parts: Sequence[Tensor]) -> Tensor:
    """The sum of an aligned subtree's leaves; it may write into them."""
    tree = LaneTree()
    for part in parts:
        tree.add([part])
    return tree.root()[1][0]


def _shared(own: Ranges, wanted: Ranges) -> list[tuple[int, int, int]]:
    """What two have in common: (place in `own`, place in `wanted`, how many), in the order of `wanted`."""
    found, to = [], 0
    for want in wanted:
        at = 0
        for have in own:
            both = common_rows(have, want)
            if both:
                found.append((at + both.start - have.start, to + both.start - want.start, len(both)))
            at += len(have)
        to += len(want)
    return found
