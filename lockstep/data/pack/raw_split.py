"""A split of raw pixels: gathered from arrays that are mapped into memory. Shapes: N C H W."""

from __future__ import annotations

import math
from copy import copy
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.data.decoding.batch_decoder import cut_range, in_parallel
from lockstep.data.decoding.decode import Pixels, resize_box
from lockstep.data.pack.pack_facts import SplitFacts, map_array
from lockstep.errors import DataError


class RawSplit:
    """Images of one shape, which need no decoding."""

    def __init__(
        self,
        folder: Path,
        split: SplitFacts,
        index: npt.NDArray[np.void],
        shape: tuple[int, int, int],
        given: tuple[int, int, int],
        share: float = 1.0,
    ) -> None:
        """Images of `shape`, H W C, are read as `given`, C H W: the largest such box in the middle.

        Of the box's sides only the middle `share` is taken.
        """
        self._paths = [folder / file.file for file in split.shards]
        self._shape, self._given, self._share = shape, given, share
        self._arrays: dict[int, npt.NDArray[np.uint8]] = {}
        self._shard = index["shard"].astype(np.int64)
        self._counts = np.bincount(self._shard, minlength=len(self._paths))
        pixels = math.prod(shape)
        starts = np.array([file.bytes for file in split.shards]) - self._counts * pixels  # after a header
        self._row, rest = np.divmod(index["offset"].astype(np.int64) - starts[self._shard], pixels)
        wrong = (rest != 0) | (self._row < 0) | (self._row >= self._counts[self._shard])
        wrong |= index["length"] != pixels
        if wrong.any():
            raise DataError(
                f"{folder / split.index.file}: sample {int(wrong.argmax())} is no image of {shape} there: "
                "copy the pack again or make it anew"
            )
        self.labels = torch.from_numpy(index["label"].astype(np.int64))

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Images and labels."""
        height, width, _ = self._shape
        ratio = self._share * min(height / self._given[1], width / self._given[2])
        rows, cols = (max(round(ratio * side), 1) for side in self._given[1:])
        middle = torch.tensor([(height - rows) // 2, (width - cols) // 2, rows, cols])
        return self.read_boxes(ids, middle.expand(len(ids), 4))

    def resized(self, size: int) -> RawSplit:
        """The same images with so many pixels a side."""
        other = copy(self)
        other._given = (self._given[0], size, size)
        return other

    def sizes(self, ids: Tensor) -> Tensor:
        """Height and width of images, int64 [N, 2]."""
        return torch.tensor(self._shape[:2]).expand(len(ids), 2)

    def read_boxes(self, ids: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
        """A box of each image (int64 [N, 4]: top, left, height, width), resized to the shape."""
        images = torch.empty((len(ids), *self._given), dtype=torch.uint8)
        out: Pixels = images.numpy()
        numbers, places = ids.tolist(), boxes.tolist()

        def fill(part: range) -> None:
            for place in part:
                number = numbers[place]
                pixels = self._array(int(self._shard[number]))[int(self._row[number])]
                resize_box(pixels, places[place], out[place])

        for _ in in_parallel(fill, cut_range(len(numbers))):
            pass
        return images, self.labels[ids]

    def _array(self, shard: int) -> npt.NDArray[np.uint8]:
        if shard not in self._arrays:
            path, count = self._paths[shard], int(self._counts[shard])
            array = map_array(path)
            if array.shape != (count, *self._shape) or array.dtype != np.uint8:
                raise DataError(
                    f"{path}: an array of {array.shape} {array.dtype}, its index says {count} images of "
                    f"{self._shape}: copy the pack again or make it anew"
                )
            self._arrays[shard] = array
        return self._arrays[shard]
