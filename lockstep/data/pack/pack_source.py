"""The encoded images of a split in a pack, by number; shards are mapped into memory when first read."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.data.images.image_file import drop_from_cache
from lockstep.data.pack.pack_facts import SplitFacts

_HEADER, _NAME = 512, 100  # bytes of a tar member's header, and of the name that it begins with


class PackSource:
    """Encoded images; only their bytes, nothing is decoded here."""

    def __init__(self, folder: Path, split: SplitFacts, index: npt.NDArray[np.void]) -> None:
        self._paths = [folder / file.file for file in split.shards]
        self._index, self._content = index, split.content_sha256()
        self._maps: dict[int, memoryview] = {}

    def __len__(self) -> int:
        return len(self._index)

    def read(self, index: int) -> memoryview:
        """The bytes of one encoded image."""
        row: Any = self._index[index]
        start = int(row["offset"])
        return self._shard(int(row["shard"]))[start : start + int(row["length"])]

    def locate(self, index: int) -> tuple[str, int, int]:
        """The shard that holds an image, where it begins and how long it is."""
        row: Any = self._index[index]
        return str(self._paths[int(row["shard"])]), int(row["offset"]), int(row["length"])

    def where(self, index: int) -> str:
        """The shard and the member that hold an image."""
        row: Any = self._index[index]
        shard, start = int(row["shard"]), int(row["offset"])
        name = bytes(self._shard(shard)[start - _HEADER : start - _HEADER + _NAME]).rstrip(b"\0")
        return f"{self._paths[shard]}: {name.decode(errors='replace')}"

    def sizes(self, ids: Tensor) -> Tensor:
        """Height and width of images after EXIF rotation, int64 [N, 2]."""
        rows = self._index[ids.numpy()]
        return torch.from_numpy(np.stack([rows["height"], rows["width"]], 1).astype(np.int64))

    def content(self) -> str:
        """What identifies the images."""
        return self._content

    def forget(self, ids: Tensor) -> None:
        """Ask the system to drop the shards that hold these images."""
        for shard in np.unique(self._index["shard"][ids.numpy()]).tolist():
            if shard in self._maps:
                mapped = self._maps[shard].obj
                assert isinstance(mapped, mmap.mmap)
                mapped.madvise(mmap.MADV_DONTNEED)
            drop_from_cache(str(self._paths[shard]))

    def _shard(self, number: int) -> memoryview:
        if number not in self._maps:
            with self._paths[number].open("rb") as stream:
                mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            self._maps.setdefault(number, memoryview(mapped))  # two threads may both come here
        return self._maps[number]
