"""The fused layers against a reference in float64, on random shapes, by Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from images import DEVICE, TILE, as_kernel, bordered, inputs, near
from torch import Tensor

from lockstep.comm.tree import tree_sum as lane_tree
from lockstep.data.augment import Augment
from lockstep.data.order import half_width, order_keys, sample_ids
from lockstep.kernels.triton.batch_gather import Move, gather_batch
from lockstep.kernels.triton.conv.fused_forward import forward
from lockstep.kernels.triton.conv.fused_gradient import input_grad, weight_grad
from lockstep.kernels.triton.conv.fused_layer import Layer
from lockstep.kernels.triton.epoch_order import order
from lockstep.kernels.triton.lane_tree_sum import lane_tree_sum

LAYERS = {
    "first": Layer(9, 7, 1, 5, (3, 3), (1, 1), pool=2),
    "colour": Layer(8, 10, 3, 18, (3, 3), (1, 1), pool=2),
    "five": Layer(9, 9, 6, 16, (5, 5), (0, 0), pool=2),
    "wide": Layer(6, 5, 16, 7, (3, 3), (1, 1)),
    "asymmetric": Layer(5, 6, 4, 3, (3, 1), (1, 0), relu=False),
    "linear": Layer(1, 1, 37, 19),
    "classifier": Layer(1, 1, 20, 7, relu=False),
}


def reference(layer: Layer, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    out = F.conv2d(x, weight, bias, padding=layer.pad)
    out = out.relu() if layer.relu else out
    return F.max_pool2d(out, 2) if layer.pool == 2 else out


def run_forward(
    layer: Layer, x: Tensor, weight: Tensor, bias: Tensor, border: tuple[int, int] = (0, 0)
) -> tuple[Tensor, Tensor]:
    height, width, channels = layer.out_shape
    out = x.new_zeros(len(x), height + 2 * border[0], width + 2 * border[1], channels)
    code = torch.full((len(x), *layer.out_shape), 9, dtype=torch.uint8, device=DEVICE)
    forward(layer, bordered(x, layer.pad), as_kernel(weight), bias, out, code, TILE, out_border=border)
    return out, code


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("name", LAYERS)
def test_forward_is_the_reference(name: str, samples: int) -> None:
    layer = LAYERS[name]
    x, weight, bias = inputs(layer, samples)
    out, _ = run_forward(layer, x, weight, bias, border=(1, 2))
    expected = reference(layer, x.double(), weight.double(), bias.double())
    near(out, bordered(expected, (1, 2)))


@pytest.mark.parametrize("name", LAYERS)
def test_a_sample_does_not_depend_on_its_batch(name: str) -> None:
    layer = LAYERS[name]
    x, weight, bias = inputs(layer, 5)
    together, _ = run_forward(layer, x, weight, bias)
    for number in range(5):
        alone, _ = run_forward(layer, x[number : number + 1], weight, bias)
        assert torch.equal(alone[0], together[number])


def conv_grad(layer: Layer, x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the convolution's output, in float64."""
    conv = F.conv2d(x.double(), weight.double(), bias.double(), padding=layer.pad).requires_grad_()
    out = conv.relu() if layer.relu else conv
    out = F.max_pool2d(out, 2) if layer.pool == 2 else out
    return torch.autograd.grad(out, conv, grad.double())[0]


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize(("lanes", "chunks"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("name", LAYERS)
def test_weight_gradients_are_each_lanes_own(name: str, lanes: int, chunks: int, compact: bool) -> None:
    layer = LAYERS[name]
    if compact and layer.pool == 1:
        pytest.skip("only a pooled gradient is compact")
    x, weight, bias = inputs(layer, 3 * lanes)
    grad = torch.randn(len(x), layer.out_channels, *layer.out_size, device=DEVICE)
    _, code = run_forward(layer, x, weight, bias)
    full = conv_grad(layer, x, weight, bias, grad)
    g = bordered(grad, (0, 0)) if compact else bordered(full.float(), layer.grad_border)
    size = layer.depth * layer.out_channels
    parts = x.new_full((lanes * chunks, size + layer.out_channels), torch.nan)
    out, out_bias = parts[:, :size], parts[:, size:]
    weight_grad(layer, g, code, bordered(x, layer.pad), out, out_bias, lanes, TILE, compact=compact)
    out = out.reshape(lanes, chunks, -1, layer.out_channels, layer.in_channels)
    out_bias = out_bias.reshape(lanes, chunks, -1)
    for lane in range(lanes):
        part = slice(3 * lane, 3 * lane + 3)
        own = weight.double().requires_grad_()
        conv = F.conv2d(x[part].double(), own, padding=layer.pad)
        expected = torch.autograd.grad(conv, own, full[part])[0]
        near(out[lane].sum(0), as_kernel(expected))
        near(out_bias[lane].sum(0), full[part].sum((0, 2, 3)))


BEFORE = {
    "pooled": (Layer(9, 7, 2, 6, (3, 3), (1, 1), pool=2), Layer(4, 3, 6, 9, (3, 3), (1, 1))),
    "plain": (Layer(5, 6, 2, 16, (3, 3), (1, 1)), Layer(5, 6, 16, 17, (5, 5), (2, 2))),
    "no relu": (Layer(5, 6, 2, 4, (3, 3), (1, 1), relu=False), Layer(5, 6, 4, 3, (5, 5), (0, 0))),
    "flat": (Layer(9, 7, 2, 5, (3, 3), (1, 1), pool=2), Layer(1, 1, 4 * 3 * 5, 16)),
    "hidden": (Layer(1, 1, 8, 24), Layer(1, 1, 24, 7, relu=False)),
}


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("name", BEFORE)
def test_input_gradient_is_ready_for_the_layer_before(name: str, compact: bool) -> None:
    before, layer = BEFORE[name]
    if compact and before.pool == 1:
        pytest.skip("only a pooled gradient is compact")
    x, first, bias = inputs(before, 3)
    out, code = run_forward(before, x, first, bias, border=layer.pad)
    _, weight, _ = inputs(layer, 1, seed=1)
    conv = F.conv2d(x.double(), first.double(), bias.double(), padding=before.pad).requires_grad_()
    hidden = conv.relu() if before.relu else conv
    hidden = F.max_pool2d(hidden, 2) if before.pool == 2 else hidden
    flat = layer.height == 1 and before.out_size != (1, 1)
    seen = hidden.permute(0, 2, 3, 1).reshape(3, -1, 1, 1) if flat else hidden
    after = F.conv2d(seen, weight.double(), padding=layer.pad)
    grad = torch.randn_like(after)
    by_conv, by_hidden = torch.autograd.grad(after, (conv, hidden), grad)
    g = bordered(grad.float(), layer.grad_border)
    shape = before.out_shape if compact else before.grad_shape
    found = x.new_zeros(3, *shape)
    input_grad(layer, before, g, as_kernel(weight), out, code, found, TILE, compact=compact)
    near(found, bordered(by_hidden, (0, 0)) if compact else bordered(by_conv, before.grad_border))


@pytest.mark.parametrize("length", [1, 2, 65, 300])
def test_the_order_is_the_hosts(length: int) -> None:
    positions = torch.arange(length, device=DEVICE)
    found = torch.full_like(positions, -1)
    keys = torch.tensor(order_keys(3, 7), device=DEVICE)
    order(positions, keys, found, length, half_width(length))
    assert torch.equal(found, sample_ids(3, 7, positions, length))


@pytest.mark.parametrize("channels", [1, 3])
def test_gathered_images_are_the_hosts(channels: int) -> None:
    augment = Augment(5, True, 2, 3, (0.4,) * channels, (0.3,) * channels)
    images = torch.randint(0, 256, (9, channels, 7, 6), dtype=torch.uint8, device=DEVICE)
    labels, numbers = torch.arange(9, device=DEVICE), torch.tensor([[1, 2, 3], [8, 0, 4]], device=DEVICE)
    out = torch.full((3, 9, 10, channels), torch.nan, device=DEVICE)
    found = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    keys, cursor = torch.tensor(augment.keys(2), device=DEVICE), torch.tensor([1], device=DEVICE)
    move = Move(augment.crop_padding, augment.flip, augment.cutout)
    gather_batch(
        images, labels, numbers, numbers, cursor, cursor * 0, keys, augment.normal(images), out, found, move,
        border=(1, 2),
    )  # fmt: skip
    expected = augment.apply(images[numbers[1]], numbers[1], 2)
    assert torch.equal(out[:, 1:-1, 2:-2], expected.permute(0, 2, 3, 1))
    assert found.tolist() == [8, 0, 4]


@pytest.mark.parametrize("rows", [1, 2, 16])
def test_the_tree_is_the_lane_tree(rows: int) -> None:
    parts = torch.randn(rows, 77, device=DEVICE)
    out, bad = torch.empty(77, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    lane_tree_sum(parts, out, bad, 0.5)
    assert torch.equal(out, lane_tree(parts) * 0.5) and not bad
    parts[rows // 2, 76] = torch.inf
    lane_tree_sum(parts, out, bad, 0.5)
    assert bad.tolist() == [1]
