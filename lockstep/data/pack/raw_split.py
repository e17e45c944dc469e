"""A split of raw pixels: gathered from arrays that are mapped into memory. Shapes: N C H W."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.data.pack.pack_facts import SplitFacts, map_array
from lockstep.errors import DataError


class RawSplit:
    """Images of one shape, which need no decoding."""

    def __init__(
        self, folder: Path, split: SplitFacts, index: npt.NDArray[np.void], shape: tuple[int, int, int]
    ) -> None:
        self._paths = [folder / file.file for file in split.shards]
        self._shape = shape  # H W C
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
        numbers = ids.numpy()
        shards, rows = self._shard[numbers], self._row[numbers]
        out = np.empty((len(numbers), *self._shape), dtype=np.uint8)
        for shard in np.unique(shards).tolist():
            here = shards == shard
            out[here] = self._array(shard)[rows[here]]
        return torch.from_numpy(out).permute(0, 3, 1, 2).contiguous(), self.labels[ids]

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
