"""How a kernel cuts its work: a value of the tuning table."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

# the type that kernels compute a precision in, and what Triton calls the precision of its products
KERNEL_TYPES = {
    "fp32": (torch.float32, "ieee"),
    "tf32": (torch.float32, "tf32"),
    "bf16": (torch.bfloat16, "ieee"),
}


@dataclass(frozen=True)
class Tile:
    """Rows and columns of the result that one program computes, and how deep it reads at a time.

    A weight gradient's sum over samples is cut into `parts` for all lanes of a run together. With `boxes`
    the pixels of a tile are a box that the GPU's copy engine moves.
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


def lane_chunks(parts: int, total_lanes: int, lane_size: int) -> int:
    """Chunks of a lane: a power of two, never more than samples, the same for any number of workers."""
    chunks = max(parts // total_lanes, 1)
    while chunks > lane_size:
        chunks //= 2
    return chunks
