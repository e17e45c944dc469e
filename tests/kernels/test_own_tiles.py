"""Kernels in the tiles of several workers, one after another: together the bits of one launch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from images import DEVICE, TILE, as_kernel, bordered, inputs
from torch import Tensor

from lockstep.kernels.triton.conv.fused_forward import forward
from lockstep.kernels.triton.conv.fused_gradient import input_grad, weight_grad
from lockstep.kernels.triton.conv.fused_layer import Layer
from lockstep.kernels.triton.conv.strided_gradient import data_grad
from lockstep.kernels.triton.conv.tma_forward import box_conv
from lockstep.kernels.triton.conv.tma_gradient import box_data_grad, box_weight_grad
from lockstep.kernels.triton.norm.norm_moments import Statistics
from lockstep.lower.fused.tile_deal import CHANNELS, COLUMNS, SAMPLES, Deal, LaunchSamples, deal_tiles

SMALL = replace(TILE, rows=16, cols=16, depth=16)
PLAIN = {"relu": False, "bias": False}
ODD = Layer(5, 4, 13, 37, (3, 3), (1, 1))  # three tiles of output channels, the last one not full
BOXES = Layer(8, 4, 32, 48, (3, 3), (1, 1), **PLAIN)


def pieces(deal: Deal, *results: Tensor) -> list[list[Tensor]]:
    """For every worker, buffers of its own that hold nothing yet."""
    return [[torch.full_like(result, 9.0) for result in results] for _ in range(deal.workers)]


def joined(deal: Deal, found: list[Tensor], dim: int, scale: float = 1) -> Tensor:
    """Every worker's part of a tensor."""
    ranges = deal.ranges(scale)
    return torch.cat(
        [part.narrow(dim, own.start, len(own)) for part, own in zip(found, ranges, strict=True)], dim
    )


@pytest.mark.parametrize("workers", [2, 3, 5])  # more than there are tiles
@pytest.mark.parametrize("axis", [CHANNELS, SAMPLES])
def test_forward_and_input_gradient(axis: str, workers: int) -> None:
    x, weight, bias = inputs(ODD, 4)
    given, kernel = bordered(x, ODD.pad), as_kernel(weight)
    before = Layer(5, 4, 3, 13, (3, 3), (1, 1), relu=False)
    g = bordered(torch.randn(4, 37, *ODD.conv_size, device=DEVICE), ODD.grad_border)

    def run(out: Tensor, grad: Tensor, n: slice, **own) -> None:
        forward(ODD, given[n], kernel, bias, out[n], None, SMALL, **own)
        input_grad(ODD, before, g[n], kernel, given[n], None, grad[n], SMALL, **own)

    whole = x.new_zeros(4, *ODD.out_shape), x.new_zeros(4, *before.grad_shape)
    run(*whole, slice(None))
    for number, (result, channels) in enumerate(zip(whole, (37, 13), strict=True)):
        deal = Deal(CHANNELS, channels, 16, workers) if axis == CHANNELS else Deal(SAMPLES, 4, 1, workers)
        parts = pieces(deal, *(torch.zeros_like(w) for w in whole))
        for rank, part in enumerate(parts):
            part[1].zero_()  # its border
            own = deal.own(rank)
            if not own.is_empty:
                run(*part, deal.samples(rank), own=own)
        found = joined(deal, [part[number] for part in parts], 3 if axis == CHANNELS else 0)
        assert torch.equal(found, result)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("axis", [CHANNELS, COLUMNS])
def test_weight_gradient(axis: str, workers: int) -> None:
    x, weight, _ = inputs(ODD, 4)
    g = bordered(torch.randn(4, 37, *ODD.conv_size, device=DEVICE), ODD.grad_border)
    whole = x.new_zeros(2, weight.numel() + 37)
    deal = Deal(axis, 37 if axis == CHANNELS else ODD.depth, 16, workers)
    parts = [part for (part,) in pieces(deal, whole)]
    given = ODD, g, None, bordered(x, ODD.pad)
    weight_grad(*given, whole[:, :-37], whole[:, -37:], 2, SMALL)
    for rank, part in enumerate(parts):
        weight_grad(*given, part[:, :-37], part[:, -37:], 2, SMALL, own=deal.own(rank))
    shape = 2, 9, 37, 13
    tables = [part[:, :-37].view(shape).permute(0, 2, 1, 3).flatten(2) for part in (whole, *parts)]
    assert torch.equal(joined(deal, tables[1:], 1 if axis == CHANNELS else 2), tables[0])
    bias = joined(deal, [part[:, -37:] for part in parts], 1) if axis == CHANNELS else parts[0][:, -37:]
    assert torch.equal(bias, whole[:, -37:])


@pytest.mark.parametrize("stride", [1, 2])
def test_strided_gradients_by_channels(stride: int) -> None:
    layer = Layer(6, 6, 21, 5, (3, 3), (1, 1), stride=stride, **PLAIN)
    x, weight, _ = inputs(layer, 2)
    dz = bordered(torch.randn(2, 5, *layer.conv_size, device=DEVICE), layer.grad_border)
    other, y = torch.randn(2, 6, 6, 21, device=DEVICE), bordered(x, (1, 1))
    whole, deal = torch.empty_like(other), Deal(CHANNELS, 21, 16, 2)
    data_grad(layer, dz, as_kernel(weight), whole, SMALL, other=other, y=y)
    parts = [part for (part,) in pieces(deal, whole)]
    for rank, part in enumerate(parts):
        data_grad(layer, dz, as_kernel(weight), part, SMALL, other=other, y=y, own=deal.own(rank))
    assert torch.equal(joined(deal, parts, 3), whole)


@pytest.mark.parametrize("by", [CHANNELS, SAMPLES])
def test_boxes_and_what_they_sum(by: str) -> None:
    lanes, size, tile = 2, 2, replace(SMALL, boxes=True)
    x, weight, _ = inputs(BOXES, lanes * size)
    z, g, kernel = x.new_zeros(4, 8, 4, 48), torch.randn(4, 8, 4, 48, device=DEVICE), as_kernel(weight)
    given, dx, boxes = bordered(x, (1, 1)), x.new_zeros(4, 8, 4, 32), 4 * 8 * 4 // 16
    moments = [x.new_zeros(boxes, 48) for _ in range(2)]
    sums = [x.new_zeros(boxes, 32) for _ in range(2)]
    stats = torch.randn(2, lanes, 32, device=DEVICE)
    for operation, channels, results in (
        ("forward", 48, [z, *moments]),
        ("input_grad", 32, [dx, *sums]),
    ):

        def run(found: list[Tensor], operation: str = operation, **own) -> None:
            image, first, second = found
            if operation == "forward":
                box_conv(BOXES, given, kernel, image, tile, moments=(first, second), **own)
            else:
                norm = dx.new_ones(4, 8, 4, 32), Statistics(first, second, *stats, *stats)
                box_data_grad(BOXES, g, kernel, image, tile, norm=norm, **own)

        run(results)
        deal = Deal(CHANNELS, channels, 16, 3) if by == CHANNELS else deal_by_samples(operation, tile)
        parts = pieces(deal, *results)
        for rank, part in enumerate(parts):
            if not deal.own(rank).is_empty:
                run(part, own=deal.own(rank))
        for number, result in enumerate(results):
            dim, scale = (result.dim() - 1, 1) if by == CHANNELS else (0, len(result) / 4)
            assert torch.equal(joined(deal, [part[number] for part in parts], dim, scale), result), number


def deal_by_samples(operation: str, tile) -> Deal:
    """One tile of channels, so that samples are more even."""
    wide = replace(BOXES, in_channels=16, out_channels=16)
    deal = deal_tiles(operation, wide, tile, LaunchSamples(4), 3)
    assert deal and deal.axis == SAMPLES
    return deal


@pytest.mark.parametrize("workers", [2, 4])
def test_weight_gradients_by_boxes(workers: int) -> None:
    tile = replace(SMALL, boxes=True)
    x, weight, _ = inputs(BOXES, 4)
    given, dz = bordered(x, (1, 1)), torch.randn(4, 8, 4, 48, device=DEVICE)
    whole = x.new_zeros(2, weight.numel())
    box_weight_grad(BOXES, dz, given, whole, tile)
    deal = deal_tiles("weight_grad", BOXES, tile, LaunchSamples(4), workers)
    assert deal
    parts = [part for (part,) in pieces(deal, whole)]
    for rank, part in enumerate(parts):
        if not deal.own(rank).is_empty:
            box_weight_grad(BOXES, dz, given, part, tile, own=deal.own(rank))
    tables = [part.view(2, 9, 48, 32).permute(0, 2, 1, 3).flatten(2) for part in (whole, *parts)]
    assert torch.equal(joined(deal, tables[1:], 1 if deal.axis == CHANNELS else 2), tables[0])


def test_a_deal_is_as_even_as_its_tiles() -> None:
    even = deal_tiles("forward", replace(ODD, out_channels=32), SMALL, LaunchSamples(5), 2)
    assert even and even.axis == CHANNELS and even.share == 1
    by_samples = deal_tiles(
        "forward", ODD, SMALL, LaunchSamples(4), 2
    )  # two tiles of channels and one are less even
    assert by_samples and by_samples.axis == SAMPLES
    assert deal_tiles("forward", replace(ODD, out_channels=10), SMALL, LaunchSamples(1), 2) is None
