"""The `compiled` set's custom ops, opaque to torch.compile: loops over lanes that call stock kernels.

Stock kernels run lane by lane, or over all lanes in one call where that is known to give the same bits. A sum
over a lane is cut into the same chunks for any number of lanes.

Shapes: x [L · n, C, …] in channels-last format, L lanes of n samples; statistics of lanes are [L, C].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.kernels.cuda_stream import side_by_side
from lockstep.kernels.stock.product_cut import find_cut
from lockstep.kernels.stock.stock_conv import lying_last, stock_conv, stock_conv_backward
from lockstep.kernels.triton.conv.fused_forward import forward
from lockstep.kernels.triton.conv.fused_gradient import weight_grad
from lockstep.kernels.triton.conv.fused_layer import Layer
from lockstep.kernels.triton.conv.tile import lane_chunks
from lockstep.kernels.triton.conv.tile_table import tile_rule
from lockstep.kernels.triton.lane_tree_sum import lane_tree_sum
from lockstep.kernels.triton.norm.norm_forward import Norm, norm_chunks
from lockstep.kernels.triton.norm.norm_gradient import column_sums, norm_sums
from lockstep.kernels.triton.norm.norm_moments import Statistics, find_moments, statistics

_LAST = torch.channels_last
_PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@torch.library.custom_op("lockstep::conv_forward", mutates_args=())
def conv_forward(
    x: Tensor, w: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int,
    lane_size: int, at_once: bool, place: int = 0,
) -> Tensor:  # fmt: skip
    """A convolution without bias, lane by lane, or all lanes in one call with `at_once`."""
    options, cut = (stride, padding, dilation, groups), find_cut(place, "forward")
    own, lanes = cut.part(w, 0) if cut else w, zip(x.split(len(x) if at_once else lane_size))
    y = _joined(side_by_side(lambda part: stock_conv(part, own, options), lanes))
    return cut.whole(y, 1) if cut else y


@torch.library.custom_op("lockstep::conv_data_grad", mutates_args=())
def conv_data_grad(
    g: Tensor, x: Tensor, w: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int,
    lane_size: int, at_once: bool, place: int = 0,
) -> Tensor:  # fmt: skip
    """The gradient of the input of `conv_forward`."""
    size, options = len(g) if at_once else lane_size, (stride, padding, dilation, groups)
    cut, own = find_cut(place, "input_grad"), w
    if cut:  # of x only its shape is read
        x, own = torch.empty_like(cut.part(x, 1), memory_format=_LAST), lying_last(cut.part(w, 1))
    lanes = zip(lying_last(g).split(size), x.split(size), strict=True)
    dx = _joined(side_by_side(lambda grad, part: stock_conv_backward(grad, part, own, options, 0), lanes))
    return cut.whole(dx, 1) if cut else dx


@torch.library.custom_op("lockstep::conv_weight_grad", mutates_args=())
def conv_weight_grad(
    g: Tensor, x: Tensor, w: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int,
    lane_size: int, place: int = 0,
) -> Tensor:  # fmt: skip
    """The weight gradient of `conv_forward` in fp32, lane by lane, summed by the lane tree."""
    options, cut = (stride, padding, dilation, groups), find_cut(place, "weight_grad")
    if cut:
        g, w = cut.part(g, 1), cut.part(w, 0)
    lanes = zip(lying_last(g).split(lane_size), x.split(lane_size), strict=True)
    grads = side_by_side(lambda grad, part: stock_conv_backward(grad, part, w, options, 1), lanes)
    each = [grad.permute(0, 2, 3, 1) for grad in grads]
    found = sum_by_tree(torch.stack(each) if len(each) > 1 else each[0][None]).permute(0, 3, 1, 2)
    return cut.whole(found, 0) if cut else found


@torch.library.custom_op("lockstep::stem_forward", mutates_args=())
def stem_forward(x: Tensor, w: Tensor, stride: list[int], padding: list[int]) -> Tensor:
    """The first convolution, without bias, by our own kernel: a sample has the same bits in any batch.

    x [N, H, W, C] has its border of zeros; w is [KH, KW, CO, C].
    """
    layer = _stem_of(x, w.shape[2], w.shape[:2], stride, padding)
    z, tile = x.new_empty(len(x), *layer.out_shape), tile_rule("forward", layer, _PRECISIONS[x.dtype])
    forward(layer, x.contiguous(), w.contiguous(), None, z, None, tile)
    return z.permute(0, 3, 1, 2)


@torch.library.custom_op("lockstep::stem_weight_grad", mutates_args=())
def stem_weight_grad(
    g: Tensor, x: Tensor, w: Tensor, stride: list[int], padding: list[int], lane_size: int, total_lanes: int
) -> Tensor:
    """The gradient of w [CO, CI, KH, KW] in fp32, all lanes in one launch, summed by the lane tree.

    x [N, H, W, C] has its border of zeros, and perhaps channels of zeros more than w.
    """
    layer, lanes = _stem_of(x, len(w), w.shape[2:], stride, padding), len(x) // lane_size
    tile = tile_rule("weight_grad", layer, _PRECISIONS[x.dtype])
    chunks = lane_chunks(tile.parts, total_lanes, lane_size)
    parts = torch.empty(lanes * chunks, layer.depth * layer.out_channels, device=x.device)
    weight_grad(layer, lying(g), None, x.contiguous(), parts, None, lanes, tile)
    found = sum_by_tree(parts).view(*layer.kernel, layer.out_channels, layer.in_channels)
    return found[..., : w.shape[1]].permute(2, 3, 0, 1).contiguous(memory_format=_LAST)


@torch.library.custom_op("lockstep::product", mutates_args=())
def product(x: Tensor, w: Tensor, lane_size: int, is_forward: bool, place: int = 0) -> Tensor:
    """x · wᵀ in the forward pass and x · w in the backward pass, lane by lane."""
    other, cut = w.t() if is_forward else w, find_cut(place, "forward" if is_forward else "input_grad")
    other = cut.part(other, 1) if cut else other
    y = torch.cat([part @ other for part in x.split(lane_size)])
    return cut.whole(y, 1) if cut else y


@torch.library.custom_op("lockstep::product_weight_grad", mutates_args=())
def product_weight_grad(g: Tensor, x: Tensor, lane_size: int, place: int = 0) -> Tensor:
    """The gradient of a product's weight in fp32, lane by lane, summed by the lane tree."""
    cut = find_cut(place, "weight_grad")
    g = cut.part(g, 1) if cut else g
    each = x.new_empty(len(x) // lane_size, g.shape[1], x.shape[1])
    for out, grad, part in zip(each, g.split(lane_size), x.split(lane_size), strict=True):
        torch.mm(grad.t(), part, out=out)
    found = sum_by_tree(each)
    return cut.whole(found, 0) if cut else found


@torch.library.custom_op("lockstep::lane_statistics", mutates_args=())
def lane_statistics(
    x: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, var: Tensor, lane_size: int, total_lanes: int,
    eps: float, momentum: float,
) -> list[Tensor]:  # fmt: skip
    """Each lane's mean, rate, factor and shift [4, L, C], and new running mean and variance [L, 2, C].

    The rate is 1 / standard deviation; the norm's output is x · factor + shift.
    """
    z, norm, lanes = lying(x), norm_of(x, lane_size, total_lanes, eps, momentum), len(x) // lane_size
    parts, found = table(x, 2, lanes * norm.part_rows()), table(x, 4, lanes)
    stats, running = Statistics(*parts, *found), table(x, lanes, 2)
    find_moments(norm, z, stats)
    statistics(norm, 0, gamma, beta, (mean, var), (running[:, 0], running[:, 1]), stats)
    return [found, running]


@torch.library.custom_op("lockstep::lane_norm_sums", mutates_args=())
def lane_norm_sums(g: Tensor, x: Tensor, stats: Tensor, lane_size: int, total_lanes: int, act: str) -> Tensor:
    """Each lane's Σ g · x̂ and Σ g [L, 2, C].

    `stats` come from `lane_statistics`. With `act`, g is the gradient of that activation's output.
    """
    norm, lanes = norm_of(x, lane_size, total_lanes), len(x) // lane_size
    parts, sums = table(x, 2, lanes * norm.part_rows()), table(x, lanes, 2)
    tables, out = (parts[0], parts[1]), (sums[:, 0], sums[:, 1])
    norm_sums(norm, lying(g), lying(x), list(stats), tables, out, act=act)
    return sums


@torch.library.custom_op("lockstep::lane_sums", mutates_args=())
def lane_sums(g: Tensor, lane_size: int, total_lanes: int) -> Tensor:
    """Each lane's Σ g [L, C] of images."""
    norm, lanes = norm_of(g, lane_size, total_lanes), len(g) // lane_size
    out = table(g, lanes)
    column_sums(norm, lying(g), table(g, lanes * norm.part_rows()), out)
    return out


@torch.library.custom_op("lockstep::lane_sum", mutates_args=())
def lane_sum(each: Tensor) -> Tensor:
    """Sum [L, …] by the lane tree."""
    return _tree_sum(each)


def over_lanes(each: Tensor) -> Tensor:
    """Sum [L, …] by the lane tree; one lane is its own sum, for which no kernel is started."""
    return each[0] if len(each) == 1 else cast(Tensor, lane_sum(each))


def _joined(parts: list[Tensor]) -> Tensor:
    """Concatenate the results of all lanes, channels last."""
    return lying_last(parts[0] if len(parts) == 1 else torch.cat(parts))


def sum_by_tree(each: Tensor) -> Tensor:
    """Sum [lanes, …] over lanes by the lane tree, in fp32; of one lane a view, if it is in fp32 already."""
    return each[0] if len(each) == 1 and each.dtype == torch.float32 else _tree_sum(each)


def _tree_sum(each: Tensor) -> Tensor:
    out = torch.empty(each.shape[1:], device=each.device)
    lane_tree_sum(each.flatten(1), out.view(-1))
    return out


def lying(x: Tensor) -> Tensor:
    """N C H W → N H W C, copied only if x is not in channels-last format."""
    return x.permute(0, 2, 3, 1).contiguous()


def table(like: Tensor, *rows: int) -> Tensor:
    """An uninitialized fp32 tensor [*rows, C]."""
    return torch.empty(*rows, like.shape[1], device=like.device)


def _stem_of(
    x: Tensor, out_channels: int, kernel: Sequence[int], stride: list[int], padding: list[int]
) -> Layer:
    """The first convolution as a fused layer, for images that have their border."""
    _, height, width, channels = x.shape
    return Layer(
        height - 2 * padding[0], width - 2 * padding[1], channels, out_channels, (kernel[0], kernel[1]),
        (padding[0], padding[1]), relu=False, stride=stride[0], bias=False,
    )  # fmt: skip


def norm_of(x: Tensor, lane_size: int, total_lanes: int, eps: float = 0.0, momentum: float = 0.0) -> Norm:
    channels, height, width = x.shape[1:]
    chunks = norm_chunks(lane_size * height * width, channels, total_lanes)
    return Norm(height, width, channels, lane_size, chunks, eps, momentum, relu=False)


# Fake implementations tell torch's compiler the shape, type and memory format of each result.
conv_forward.register_fake(
    lambda x, w, stride, padding, dilation, groups, *_: torch.empty_like(
        F.conv2d(x, w, None, stride, padding, dilation, groups), memory_format=_LAST
    )
)
stem_forward.register_fake(
    lambda x, w, stride, _: torch.empty_like(
        F.conv2d(x.permute(0, 3, 1, 2), w.permute(2, 3, 0, 1), None, stride), memory_format=_LAST
    )
)
stem_weight_grad.register_fake(
    lambda g, x, w, *_: torch.empty_like(w, dtype=torch.float32, memory_format=_LAST)
)
conv_data_grad.register_fake(lambda g, x, *_: torch.empty_like(x, memory_format=_LAST))
conv_weight_grad.register_fake(
    lambda g, x, w, *_: torch.empty_like(w, dtype=torch.float32, memory_format=_LAST)
)
product.register_fake(lambda x, w, size, is_forward, *_: x.new_empty(len(x), w.shape[0 if is_forward else 1]))
product_weight_grad.register_fake(lambda g, x, *_: x.new_empty(g.shape[1], x.shape[1], dtype=torch.float32))
lane_statistics.register_fake(
    lambda x, gamma, beta, mean, var, size, *_: [table(x, 4, len(x) // size), table(x, len(x) // size, 2)]
)
lane_norm_sums.register_fake(lambda g, x, stats, *_: table(x, stats.shape[1], 2))
lane_sums.register_fake(lambda g, size, _: table(g, len(g) // size))
lane_sum.register_fake(lambda each: each.new_empty(each.shape[1:], dtype=torch.float32))
