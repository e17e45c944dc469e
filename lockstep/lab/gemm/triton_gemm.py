"""The product in Triton: the tile is written down, and a compiler finds copies, barriers and tensor cores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = {"BM": 128, "BN": 256, "BK": 64, "SQUARE": 8}


@triton.jit
def _gemm(
    a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SQUARE: tl.constexpr,
):  # fmt: skip
    """A tile of BM × BN; programs walk down columns of SQUARE tiles, which share rows of A in the cache."""
    tiles_y, tiles_x = tl.cdiv(M, BM), tl.cdiv(N, BN)
    program, in_square = tl.program_id(0), SQUARE * tiles_x
    first = program // in_square * SQUARE
    high = min(SQUARE, tiles_y - first)
    y = first + program % in_square % high
    x = program % in_square // high
    rows, columns, deep = y * BM + tl.arange(0, BM), x * BN + tl.arange(0, BN), tl.arange(0, BK)
    sums = tl.zeros((BM, BN), tl.float32)
    in_rows, in_columns = (rows < M)[:, None], (columns < N)[None, :]
    a += rows[:, None].to(tl.int64) * K
    b += columns[None, :]
    for start in range(0, K, BK):
        k = start + deep
        own_a = tl.load(a + k[None, :], mask=in_rows & (k < K)[None, :], other=0.0)
        own_b = tl.load(b + k[:, None].to(tl.int64) * N, mask=in_columns & (k < K)[:, None], other=0.0)
        sums = tl.dot(own_a, own_b, sums, input_precision="ieee")
    c += rows[:, None].to(tl.int64) * N + columns[None, :]
    tl.store(c, sums.to(c.dtype.element_ty), mask=in_rows & in_columns)


def multiply_by_triton(a: Tensor, b: Tensor) -> Tensor:
    """The product of two row-major matrices on a GPU."""
    (rows, depth), columns = a.shape, b.shape[1]
    result = torch.empty(rows, columns, device=a.device, dtype=a.dtype)
    tiles = triton.cdiv(rows, _TILE["BM"]) * triton.cdiv(columns, _TILE["BN"])
    _gemm[(tiles,)](a, b, result, rows, columns, depth, **_TILE, num_warps=8, num_stages=3)
    return result
