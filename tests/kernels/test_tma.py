"""Convolutions by boxes of pixels against a reference in float64, by Triton's interpreter or on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from images import DEVICE, TILE, as_kernel, bordered, gradients, inputs, near
from torch import Tensor

from lockstep.kernels.triton.conv.fused_layer import Layer
from lockstep.kernels.triton.conv.tma_box import find_box, holds_lanes, takes_boxes
from lockstep.kernels.triton.conv.tma_forward import Ending, box_conv
from lockstep.kernels.triton.conv.tma_gradient import box_data_grad, box_weight_grad
from lockstep.kernels.triton.norm.norm_forward import Norm, apply
from lockstep.kernels.triton.norm.norm_moments import Statistics

PLAIN = {"relu": False, "bias": False}
LAYERS = {
    "same": Layer(8, 4, 16, 32, (3, 3), (1, 1), **PLAIN),
    "many images": Layer(4, 4, 32, 16, (3, 3), (1, 1), **PLAIN),
    "odd sides": Layer(7, 5, 16, 16, (3, 3), (1, 1), **PLAIN),
    "half": Layer(8, 16, 16, 16, (3, 3), (1, 1), stride=2, **PLAIN),
    "projection": Layer(8, 8, 16, 32, stride=2, **PLAIN),
    "wide": Layer(2, 64, 16, 16, (1, 5), (0, 2), **PLAIN),
}


def lying(images: Tensor) -> Tensor:
    """N C H W → N H W C."""
    return images.permute(0, 2, 3, 1).contiguous()


@pytest.mark.parametrize("name", LAYERS)
def test_the_forward_pass_and_its_moments_are_the_reference(name: str) -> None:
    layer = LAYERS[name]
    box = find_box(TILE.rows, *layer.conv_size)
    x, weight, _ = inputs(layer, 3)
    padded = bordered(x, (layer.pad[0] + layer.stride, layer.pad[1] + layer.stride))
    out = x.new_full((3, *layer.out_shape), 9.0)
    pixels = layer.conv_size[0] * layer.conv_size[1]
    boxes = -(-3 // box.images) * box.images * pixels // TILE.rows
    moments = [x.new_full((boxes, layer.out_channels), 9.0) for _ in range(2)]
    assert takes_boxes("forward", layer, TILE, 3)
    box_conv(layer, padded, as_kernel(weight), out, TILE, moments=(moments[0], moments[1]))
    near(out, lying(F.conv2d(x.double(), weight.double(), stride=layer.stride, padding=layer.pad)))
    if box.images == 1:
        high, wide = layer.conv_size[0] // box.rows, layer.conv_size[1] // box.cols
        cut = out.double().view(3, high, box.rows, wide, box.cols, -1).permute(0, 1, 3, 2, 4, 5)
        parts = cut.reshape(boxes, TILE.rows, -1)
        near(moments[0], parts.mean(1))
        near(moments[1], (parts - parts.mean(1, keepdim=True)).square().sum(1))


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_an_ending_is_a_norm_that_is_applied_later(name: str, residual: bool) -> None:
    """In every bit, in borders of their own, which stay as they are."""
    layer = LAYERS[name]
    (high, wide), channels = layer.conv_size, layer.out_channels
    x, weight, shift = inputs(layer, 3)
    given = bordered(x, (layer.pad[0] + layer.stride, layer.pad[1] + layer.stride)), as_kernel(weight)
    factor, z = torch.randn(channels, device=DEVICE), x.new_empty(3, high, wide, channels)
    other = torch.randn(3, high + 2, wide + 4, channels, device=DEVICE) if residual else None
    found, expected = (x.new_full((3, high + 4, wide + 2, channels), 9.0) for _ in range(2))
    box_conv(layer, *given, found, TILE, ending=Ending(factor, shift, other, relu=residual))
    box_conv(layer, *given, z, TILE)
    norm = Norm(high, wide, channels, 3, 1, 0.0, 0.0, relu=residual)
    apply(norm, z, factor, shift, expected, other, norm.rows)
    assert torch.equal(found, expected) and (found[:, :2] == 9).all()


@pytest.mark.parametrize("through", ["nothing", "relu and another way"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_data_gradient_is_the_reference(name: str, through: str) -> None:
    layer = LAYERS[name]
    x, weight, _ = inputs(layer, 3)
    dz = torch.randn(3, layer.out_channels, *layer.conv_size, device=DEVICE)
    expected, _ = gradients(layer, x, weight, dz)
    given = {}
    if through != "nothing":
        other = torch.randn_like(x)
        expected = torch.where(x > 0, expected + other, 0.0)
        given = {"other": lying(other), "y": bordered(x, (2, 1))}
    out = torch.full_like(lying(x), 9.0)
    assert takes_boxes("input_grad", layer, TILE, 3)
    box_data_grad(layer, lying(dz), as_kernel(weight), out, TILE, **given)
    near(out, lying(expected))


@pytest.mark.parametrize("name", LAYERS)
def test_the_data_gradient_sums_what_a_norm_wants_of_it(name: str) -> None:
    layer, lanes, size = LAYERS[name], 2, 32
    x, weight, _ = inputs(layer, lanes * size)
    dz = torch.randn(len(x), layer.out_channels, *layer.conv_size, device=DEVICE)
    z, mean, rate = torch.randn_like(x), *torch.randn(2, lanes, layer.in_channels, device=DEVICE)
    parts = size * layer.height * layer.width // TILE.rows
    tables = [x.new_full((lanes * parts + 1, layer.in_channels), 9.0) for _ in range(2)]
    out = torch.full_like(lying(x), 9.0)
    assert holds_lanes("input_grad", layer, TILE, size)
    norm, shape = (lying(z), Statistics(*tables, mean, rate, mean, rate)), (lanes, -1, layer.in_channels)
    box_data_grad(layer, lying(dz), as_kernel(weight), out, TILE, y=bordered(x, (2, 1)), norm=norm)
    normal = (lying(z).view(shape).double() - mean[:, None]) * rate[:, None]
    g = out.view(shape).double()
    for table, expected in zip(tables, (g * normal, g), strict=True):
        near(table[:-1].view(shape).double().sum(1), expected.sum(1))
        assert (table[-1] == 9).all()


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "odd sides"])
def test_weight_gradients_are_each_lanes_own(name: str) -> None:
    layer, lanes, chunks, size = LAYERS[name], 2, 2, 8
    tile = replace(TILE, rows=16, depth=32)
    x, weight, _ = inputs(layer, size * lanes)
    dz = torch.randn(len(x), layer.out_channels, *layer.conv_size, device=DEVICE)
    parts = x.new_full((lanes * chunks, weight.numel() + 5), 9.0)
    assert takes_boxes("weight_grad", layer, tile, size, chunks)
    border = layer.pad[0] + layer.stride, layer.pad[1] + layer.stride
    box_weight_grad(layer, lying(dz), bordered(x, border), parts[:, 2:-3], tile)
    for lane in range(lanes):
        own = slice(size * lane, size * lane + size)
        found = parts[lane * chunks : (lane + 1) * chunks, 2:-3].sum(0)
        near(found, as_kernel(gradients(layer, x[own], weight, dz[own])[1]).flatten())
    assert (parts[:, :2] == 9).all() and (parts[:, -3:] == 9).all()


def test_what_does_not_fit_is_refused() -> None:
    layer = LAYERS["same"]
    assert not takes_boxes("forward", replace(layer, in_channels=12), TILE, 4)
    assert not takes_boxes("forward", replace(layer, in_channels=24), TILE, 4)
    assert not takes_boxes("input_grad", replace(layer, out_channels=24), TILE, 4)
    assert not takes_boxes("forward", replace(LAYERS["half"], height=7), TILE, 4)
    tile = replace(TILE, rows=16, depth=32)
    assert not takes_boxes("weight_grad", LAYERS["odd sides"], tile, 32)
    assert not takes_boxes("weight_grad", LAYERS["many images"], tile, 3)
