"""A tile: how one convolution kernel cuts its work into blocks, warps and stages; whose tiles they are."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

# for each precision: the type of the kernels' tensors, and Triton's name for the precision of products
KERNEL_TYPES = {
    "fp32": (torch.float32, "ieee"),
    "tf32": (torch.float32, "tf32"),
    "bf16": (torch.bfloat16, "ieee"),
    "fp16": (torch.float16, "ieee"),
}


@dataclass(frozen=True)
class Tile:
    """Rows and columns of the result that one program computes, and the depth that it loads at a time.

    The sum over samples of a weight gradient is cut into `parts`, counted over all lanes of the run. With
    `boxes`, the pixels of a tile are a TMA box, which the GPU's copy engine moves.
    """

    rows: int
    cols: int
    depth: int
    warps: int = 4
    stages: int = 3
    parts: int = 1
    boxes: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "boxes":
                continue
            if value < 1 or (name != "stages" and value & (value - 1)):
                raise ValueError(f"{name}={value} of a tile must be a power of two")
        if min(self.rows, self.cols, self.depth) < 16:
            raise ValueError("rows, columns and depth of a tile must be at least 16")


@dataclass(frozen=True)
class OwnTiles:
    """The tiles of a launch that are computed, if several workers share it; None: all of them.

    A tile is the same program, whoever computes it, so its bits are the same.
    """

    channels: range | None = None  # of the result
    across: range | None = None  # boxes of pixels, or columns of a weight gradient

    def of(self, channels: int, across: int) -> tuple[range, range]:
        """The tiles along both, of as many as there are."""
        return self.channels or range(channels), self.across or range(across)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to launch."""
        return any(tiles is not None and not tiles for tiles in (self.channels, self.across))


ALL_TILES = OwnTiles()


def lane_chunks(parts: int, total_lanes: int, lane_size: int) -> int:
    """Chunks of a lane: a power of two, at most its samples, and the same for any number of workers."""
    chunks = max(parts // total_lanes, 1)
    while chunks > lane_size:
        chunks //= 2
    return chunks
