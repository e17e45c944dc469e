"""Gradients become rows of bytes and come back, by C on a CPU: each block in one pass over memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.comm.compress.block_layout import BlockLayout, BlockPlace
from lockstep.comm.compress.codec_library import call_codec
from lockstep.comm.compress.feedback import Feedback
from lockstep.comm.compress.torch_rows import Part
from lockstep.comm.compress.unfinished_feedback import UnfinishedFeedback
from lockstep.spec.rule.compression import BLOCK

_KINDS = ("bf16", "int8", "fp8", "top")  # as C counts them


class NativeRows:
    """The rows of one bucket, by the codecs in C."""

    def __init__(self, layout: BlockLayout, feedback: Feedback, rank: int) -> None:
        how = feedback.compression
        self._layout, self._feedback, self._rank = layout, feedback, rank
        self._row_bytes = how.row_bytes
        self._lost, self._lost_mean = UnfinishedFeedback(), UnfinishedFeedback()
        self._codec = [_KINDS.index(how.kind), how.count]
        self._means = [torch.empty(shape.numel()) for shape in layout.shapes]

    def add_lane(self, lane: int, grads: Sequence[Tensor], sums: bool) -> tuple[Tensor, Tensor | None]:
        """The rows that a lane's gradients become; if it `sums` them, also what these rows say."""
        layout, kept = self._layout, self._feedback.lanes[lane]
        lost = self._lost.beside(lane, kept, layout.names)
        packed = torch.empty(layout.num_rows, self._row_bytes, dtype=torch.uint8)
        found = torch.empty(layout.num_rows, BLOCK) if sums else None
        given = [grad.contiguous() for grad in grads]
        for place in layout.places:
            name, first = layout.names[place.index], 4 * BLOCK * place.start
            call_codec(
                "pack_lane",
                [*self._codec, self._size(place)],
                given[place.index].data_ptr() + first,
                kept[name].data_ptr() + first,
                lost[name].data_ptr() + first,
                packed[place.row],
                found[place.row] if found is not None else 0,
            )
        return packed, found

    def pack_mean(self, parts: Sequence[Part]) -> Tensor:
        """The rows that this worker's means become: of all lanes' rows of them, or sums over subtrees."""
        layout, kept = self._layout, self._feedback.means
        lost, own = self._lost_mean.beside(0, kept, layout.names), layout.rank_rows[self._rank]
        packed = torch.empty(len(own), self._row_bytes, dtype=torch.uint8)
        heights = (ctypes.c_int32 * len(parts))(*(-1 if part.is_packed else part.height for part in parts))
        for place in layout.own_places(self._rank):
            name, row = layout.names[place.index], place.row - own.start
            starts = (ctypes.c_void_p * len(parts))(*(part.rows[row].data_ptr() for part in parts))
            call_codec(
                "pack_mean",
                [*self._codec, place.stop - place.start, len(parts)],
                starts,
                heights,
                kept[name],
                lost[name],
                packed[row],
            )
        return packed

    def read(self, packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        """The means that rows say, with the memory format of an example each; valid until the next ones."""
        for place in self._layout.places:
            start = self._means[place.index].data_ptr() + 4 * BLOCK * place.start
            call_codec("unpack", [*self._codec, self._size(place)], packed[place.row], start)
        return self._layout.shaped(self._means, like)

    def commit(self, bad: Tensor | None) -> None:
        """Remember what the step left out, unless it is bad."""
        self._lost.commit(bad)
        self._lost_mean.commit(bad)

    def _size(self, place: BlockPlace) -> int:
        """The elements of a place; the last block of a parameter may be short."""
        return min(place.stop * BLOCK, self._layout.shapes[place.index].numel()) - place.start * BLOCK
