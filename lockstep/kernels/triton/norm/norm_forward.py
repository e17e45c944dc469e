"""Batch norm of all lanes, forward pass: applies each lane's statistics, a residual and a ReLU.

A lane's rows are cut into chunks. Their number depends on the Run, but not on how many lanes a worker has.
`norm_moments` finds the mean and the squared deviations of every chunk and joins them.

Legend: z is the input of the norm, y the output, g the gradient of the ReLU's input, dz the gradient of z.
Rows are pixels, R of them in a lane; C channels; L lanes. Means and factors are [L, C]. Images are stored as
N H W C; y and dz have a border of zeros (BH, BW) for the convolutions that read them.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 2048  # about how many programs a kernel is cut into
ROWS, _COLS = 64, 64  # of a block
JOINED = 64  # parts that one program joins


@dataclass(frozen=True)
class Norm:
    """The shapes and options of one batch norm, for one lane of `lane_size` samples."""

    height: int
    width: int
    channels: int
    lane_size: int
    chunks: int
    eps: float
    momentum: float
    relu: bool

    @property
    def rows(self) -> int:
        """R."""
        return self.lane_size * self.height * self.width

    def part_rows(self, parts: int | None = None) -> int:
        """Rows of one lane in a table of parts: the parts, and room for the results of joining them."""
        parts = parts or self.chunks
        return parts if parts == 1 else parts + self.part_rows(triton.cdiv(parts, JOINED))

    @property
    def block(self) -> int:
        """Channels of a block."""
        return min(max(1 << (self.channels - 1).bit_length(), 16), _COLS)


def norm_chunks(rows: int, channels: int, total_lanes: int) -> int:
    """Chunks of a lane: a power of two that fills a device, the same for any number of workers."""
    chunks = 1
    while 2 * chunks * total_lanes * triton.cdiv(channels, _COLS) <= _PROGRAMS and 2 * chunks * ROWS <= rows:
        chunks *= 2
    return chunks


@triton.jit
def image_place(q, c, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr):
    """The offsets of pixels q and channels c in images with a border (BH, BW)."""
    n, pixel = q // (H * W), q % (H * W)
    row = (n * (H + 2 * BH) + pixel // W + BH) * (W + 2 * BW) + pixel % W + BW
    return row[:, None] * C + c[None, :]


@triton.jit
def chunk_rows(part, R: tl.constexpr, CHUNKS: tl.constexpr):
    """The first row of a chunk, counted over all lanes, and the chunk's number of rows."""
    SIZE: tl.constexpr = (R + CHUNKS - 1) // CHUNKS
    first = part % CHUNKS * SIZE
    return part // CHUNKS * R + first, tl.maximum(tl.minimum(SIZE, R - first), 0)


@triton.jit
def lane_rows(q, total, R: tl.constexpr, BR: tl.constexpr):
    """The lane of each row of a block, as a column; a single value if no block has rows of two lanes."""
    if R % BR == 0:
        lanes = tl.program_id(0) * BR // R + tl.zeros((1, 1), tl.int32)
    else:
        lanes = (tl.minimum(q, total - 1) // R)[:, None]
    return lanes


@triton.jit
def _apply(
    z, factor, shift, residual, y, total,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, RH: tl.constexpr, RW: tl.constexpr,
    BH: tl.constexpr, BW: tl.constexpr, R: tl.constexpr, HAS_RESIDUAL: tl.constexpr, RELU: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """y = ReLU(z · factor + shift + residual)."""
    q = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    mask = (q < total)[:, None] & (c < C)[None, :]
    x = tl.load(z + q[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
    lane = lane_rows(q, total, R, BR)
    own, real = lane * C + c[None, :], (c < C)[None, :]
    x = x * tl.load(factor + own, mask=real, other=0.0) + tl.load(shift + own, mask=real, other=0.0)
    if HAS_RESIDUAL:
        x += tl.load(residual + image_place(q, c, H, W, C, RH, RW), mask=mask, other=0.0).to(tl.float32)
    if RELU:
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(y + image_place(q, c, H, W, C, BH, BW), x.to(y.dtype.element_ty), mask=mask)


def apply(
    norm: Norm, z: Tensor, factor: Tensor, shift: Tensor, y: Tensor, residual: Tensor | None, rows: int
) -> None:
    """Write y [N, H + 2 BH, W + 2 BW, C] from z and an optional residual; every `rows` rows share factors."""
    total = z.numel() // norm.channels
    border, theirs = border_of(norm, y), border_of(norm, y if residual is None else residual)
    _apply[(triton.cdiv(total, ROWS), triton.cdiv(norm.channels, norm.block))](
        z, factor, shift, residual, y, total,
        H=norm.height, W=norm.width, C=norm.channels, RH=theirs[0], RW=theirs[1], BH=border[0], BW=border[1],
        R=rows, HAS_RESIDUAL=residual is not None, RELU=norm.relu, BR=ROWS, BC=norm.block,
        enable_fp_fusion=False,
    )  # fmt: skip


def border_of(norm: Norm, image: Tensor) -> tuple[int, int]:
    return (image.shape[1] - norm.height) // 2, (image.shape[2] - norm.width) // 2
