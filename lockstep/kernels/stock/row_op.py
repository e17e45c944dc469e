"""Custom ops of the `compiled` set that sum rows: layer norm, and factors that are spread over an image.

Shapes: x [N, …, C], a row is its last dimension; images [N, C, H, W] in channels-last format.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.kernels.stock.custom_op import lying, norm_of, table
from lockstep.kernels.triton.norm.norm_forward import Norm, norm_chunks
from lockstep.kernels.triton.norm.row_norm import product_sums, row_moments, row_norm_sums


@torch.library.custom_op("lockstep::row_statistics", mutates_args=())
def row_statistics(x: Tensor, eps: float) -> Tensor:
    """Each row's mean and 1 / standard deviation [2, N, …]."""
    found = torch.empty(2, *x.shape[:-1], device=x.device)
    row_moments(_rows(x), eps, found[0], found[1])
    return found


@torch.library.custom_op("lockstep::row_sums", mutates_args=())
def row_sums(
    g: Tensor, x: Tensor, stats: Tensor, gamma: Tensor, lane_size: int, total_lanes: int
) -> list[Tensor]:
    """Each row's Σ g · γ · x̂ and Σ g · γ [2, N, …], and Σ g · x̂ and Σ g over all rows of a lane [L, 2, C]."""
    (height, channels), lanes = _rows(x).shape, len(x) // lane_size
    rows = height // lanes
    norm = Norm(1, 1, channels, rows, norm_chunks(rows, channels, total_lanes), 0.0, 0.0, relu=False)
    parts = torch.empty(2, lanes * norm.part_rows(), channels, device=x.device)
    found, sums = torch.empty_like(stats), torch.empty(lanes, 2, channels, device=x.device)
    tables, out = (parts[0], parts[1]), (sums[:, 0], sums[:, 1])
    row_norm_sums(norm, _rows(g), _rows(x), stats, gamma, found, tables, out)
    return [found, sums]


@torch.library.custom_op("lockstep::product_sum", mutates_args=())
def product_sum(a: Tensor, b: Tensor, lane_size: int, total_lanes: int) -> Tensor:
    """Σ a · b of images for every channel, lane by lane [L, C]."""
    norm, lanes = norm_of(a, lane_size, total_lanes), len(a) // lane_size
    out = table(a, lanes)
    product_sums(norm, lying(a), lying(b), table(a, lanes * norm.part_rows()), out)
    return out


def _rows(x: Tensor) -> Tensor:
    return x.contiguous().view(-1, x.shape[-1])


row_statistics.register_fake(lambda x, *_: x.new_empty(2, *x.shape[:-1], dtype=torch.float32))
row_sums.register_fake(
    lambda g, x, stats, gamma, size, _: [
        torch.empty_like(stats), stats.new_empty(len(x) // size, 2, x.shape[-1])
    ]
)  # fmt: skip
product_sum.register_fake(lambda a, b, size, *_: table(a, len(a) // size))
