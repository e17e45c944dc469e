"""What workers send of a model's gradients in a step: byte for byte what the reducer's buckets send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lockstep.spec.profile import WeightShape
from lockstep.spec.rule.bucket_cut import cut_buckets
from lockstep.spec.rule.compression import BLOCK, SUM_BYTES, Compression, own_blocks
from lockstep.spec.rule.lane_share import all_heights

BUCKET_BYTES = 25e6


@dataclass(frozen=True)
class Parcel:
    """Tensors that travel together: as they are, or compressed in rounds of messages."""

    names: tuple[str, ...]  # of its parameters; empty for what is known after the last lane
    num_bytes: int  # as they are
    sent: tuple[int, ...]  # bytes that each worker sends to all others
    rounds: tuple[int, ...] = ()  # of one that is compressed: the most that a worker sends or gets
    values: int = 0  # that are compressed, in whole blocks
    own_values: int = 0  # the most of them that one worker sums
    parts: int = 0  # of which the sum of a block consists, as they arrive


@dataclass(frozen=True)
class Sender:
    """Lanes of a run over some workers, all of which reduce the same tensors."""

    lanes: int
    workers: int
    compression: Compression | None = None
    wire_bytes: int = 4  # of a gradient that is not compressed

    @cached_property
    def _heights(self) -> list[list[int]]:
        return all_heights(self.lanes, self.workers)

    def parcels(self, weights: Sequence[WeightShape], others: Sequence[int] = ()) -> list[Parcel]:
        """In the order in which they travel; `others` are values of what travels beside gradients."""
        how, found = self.compression, list[Parcel]()
        taken = [each for each in weights if how and how.takes(each.shape)]
        number = {each.name: place for place, each in enumerate(taken)}
        for own in _cut([each for each in reversed(weights) if each.name in number]):
            found.append(self._factors(own) if how and how.rank else self._packed(own, number))
        rest = [(each, self.wire_bytes) for each in reversed(weights) if each.name not in number]
        rest += [(WeightShape("", (size,)), 4) for size in others]
        for own in _cut([each for each, _ in rest], [width for _, width in rest]):
            found.append(self._plain(own, 4 if not own[0].name else self.wire_bytes))
        return found

    def _plain(self, tensors: Sequence[WeightShape], width: int) -> Parcel:
        count, length = self.workers, sum(each.values for each in tensors)
        part = max(-(-length // count), 1) * width * (count - 1)
        sent = tuple((len(own) + 1) * part for own in self._heights)
        return Parcel(_names(tensors), length * width, sent)

    def _packed(self, tensors: Sequence[WeightShape], number: dict[str, int]) -> Parcel:
        """Block by block: the tree's roots, packed or as sums, to those who sum them, then packed means."""
        assert self.compression
        count, width = self.workers, self.compression.row_bytes
        blocks = [(-(-each.values // BLOCK), number[each.name]) for each in tensors]
        rows = [
            sum(len(own_blocks(size, index, count, rank)) for size, index in blocks) for rank in range(count)
        ]
        total, packed = sum(rows), self.compression.travels_packed
        roots = [
            sum(width << height if packed(height) else SUM_BYTES for height in own) for own in self._heights
        ]
        first = [(total - own) * root for own, root in zip(rows, roots, strict=True)]
        got = [own * (sum(roots) - root) for own, root in zip(rows, roots, strict=True)]
        second = [(count - 1) * own * width for own in rows]
        return Parcel(
            _names(tensors),
            4 * sum(each.values for each in tensors),
            tuple(map(sum, zip(first, second, strict=True))),
            (max(*first, *got), max(*second, *((total - own) * width for own in rows))),
            total * BLOCK,
            max(rows) * BLOCK,
            sum(1 << height if packed(height) else 1 for own in self._heights for height in own),
        )

    def _factors(self, tensors: Sequence[WeightShape]) -> Parcel:
        """As two factors, each summed as if it were a gradient."""
        assert self.compression
        count, rank = self.workers, self.compression.rank
        heads = sum(each.shape[0] for each in tensors) * rank
        tails = sum(each.values // each.shape[0] for each in tensors) * rank
        parts = [4 * max(-(-length // count), 1) * (count - 1) for length in (heads, tails)]
        values, roots = sum(each.values for each in tensors), [len(own) for own in self._heights]
        rounds = [part * number for part in parts for number in (max(roots), 1)]
        sent = tuple(sum(parts) * (number + 1) for number in roots)
        return Parcel(_names(tensors), 4 * values, sent, tuple(rounds), values, values, 1)


def _cut(tensors: Sequence[WeightShape], widths: Sequence[int] = ()) -> list[list[WeightShape]]:
    """Tensors in buckets, of one width each, by their bytes in memory."""
    sizes = [4 * each.values for each in tensors]
    return [[tensors[i] for i in own] for own in cut_buckets(sizes, widths or [4] * len(sizes), BUCKET_BYTES)]


def _names(tensors: Sequence[WeightShape]) -> tuple[str, ...]:
    return tuple(each.name for each in tensors)
