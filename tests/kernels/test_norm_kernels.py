"""Strides, residuals and batch norm against a reference in float64, by Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from images import DEVICE, TILE, as_kernel, bordered, gradients, inputs, near
from torch import Tensor

from lockstep.kernels.triton.conv.fused_forward import forward
from lockstep.kernels.triton.conv.fused_gradient import weight_grad
from lockstep.kernels.triton.conv.fused_layer import Layer
from lockstep.kernels.triton.conv.strided_gradient import data_grad
from lockstep.kernels.triton.norm import norm_forward as norms
from lockstep.kernels.triton.norm import norm_gradient as norm_grads
from lockstep.kernels.triton.norm import norm_moments as moments
from lockstep.kernels.triton.norm.norm_forward import Norm, apply, norm_chunks
from lockstep.kernels.triton.norm.norm_gradient import norm_grad
from lockstep.kernels.triton.norm.norm_moments import Statistics, find_moments, statistics

PLAIN = {"relu": False, "bias": False}
LAYERS = {
    "same": Layer(6, 5, 16, 7, (3, 3), (1, 1), **PLAIN),
    "half": Layer(8, 6, 5, 16, (3, 3), (1, 1), stride=2, **PLAIN),
    "half of odd sides": Layer(7, 9, 16, 18, (3, 3), (1, 1), stride=2, **PLAIN),
    "projection": Layer(8, 7, 16, 6, (1, 1), (0, 0), stride=2, **PLAIN),
    "narrow": Layer(5, 4, 20, 16, (1, 1), (0, 0), **PLAIN),
    "stem": Layer(13, 14, 3, 8, (7, 7), (3, 3), stride=2, **PLAIN),
    "thirds": Layer(9, 8, 4, 16, (5, 4), (2, 1), stride=3, **PLAIN),
}


def wider(layer: Layer, x: Tensor) -> Tensor:
    """The layer's input in a border that is one wider than the layer reads."""
    return bordered(x, (layer.pad[0] + 1, layer.pad[1] + 1))


@pytest.mark.parametrize("name", LAYERS)
def test_a_strided_convolution_is_the_reference(name: str) -> None:
    layer = LAYERS[name]
    x, weight, _ = inputs(layer, 3)
    out = x.new_zeros(3, *layer.out_shape)
    forward(layer, wider(layer, x), as_kernel(weight), None, out, None, TILE)
    expected = F.conv2d(x.double(), weight.double(), stride=layer.stride, padding=layer.pad)
    near(out, expected.permute(0, 2, 3, 1))


@pytest.mark.parametrize("through", ["nothing", "relu and another way"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_data_gradient_is_the_reference(name: str, through: str) -> None:
    layer = LAYERS[name]
    x, weight, _ = inputs(layer, 2)
    dz = torch.randn(2, layer.out_channels, *layer.conv_size, device=DEVICE)
    expected, _ = gradients(layer, x, weight, dz)
    given = {}
    if through != "nothing":
        other = torch.randn_like(x)
        expected = torch.where(x > 0, expected + other, 0.0)
        given = {"other": other.permute(0, 2, 3, 1).contiguous(), "y": bordered(x, (2, 1))}
    out = x.new_full((2, layer.height, layer.width, layer.in_channels), 9.0)
    data_grad(layer, bordered(dz, layer.grad_border), as_kernel(weight), out, TILE, **given)
    near(out, expected.permute(0, 2, 3, 1))


@pytest.mark.parametrize("name", LAYERS)
def test_weight_gradients_with_a_stride_are_each_lanes_own(name: str) -> None:
    layer, lanes, chunks = LAYERS[name], 2, 2
    x, weight, _ = inputs(layer, 3 * lanes)
    dz = torch.randn(len(x), layer.out_channels, *layer.conv_size, device=DEVICE)
    parts = x.new_zeros(lanes * chunks, weight.numel())
    weight_grad(layer, bordered(dz, layer.grad_border), None, wider(layer, x), parts, None, lanes, TILE)
    for lane in range(lanes):
        own = slice(3 * lane, 3 * lane + 3)
        found = parts[lane * chunks : (lane + 1) * chunks].sum(0)
        near(found, as_kernel(gradients(layer, x[own], weight, dz[own])[1]).flatten())


CASES = {
    "plain": (5, 4, 18, False),
    "relu": (3, 7, 16, True),
    "many": (12, 12, 5, True),
    "tall": (1, 2, 70, True),
    "whole blocks": (8, 8, 16, True),
    "empty chunks": (1, 3, 4, True),
}


def make(name: str, lanes: int, total_lanes: int = 4) -> tuple[Norm, Statistics, dict[str, Tensor]]:
    height, width, channels, relu = CASES[name]
    size = 3
    chunks = norm_chunks(size * height * width, channels, total_lanes)
    if name == "empty chunks":  # as 3 x 911 pixels have, which take an interpreter long
        chunks = 8
    norm = Norm(height, width, channels, size, chunks, 1e-5, 0.1, relu)
    torch.manual_seed(1)
    rows = [torch.randn(channels, device=DEVICE) for _ in range(4)]
    parts = [torch.zeros(lanes * norm.part_rows(), channels, device=DEVICE) for _ in range(2)]
    means = [torch.zeros(lanes, channels, device=DEVICE) for _ in range(4)]
    names = ("gamma", "beta", "running_mean", "running_var")
    return norm, Statistics(*parts, *means), dict(zip(names, rows, strict=True))


def data(norm: Norm, lanes: int, kinds: int = 3) -> list[Tensor]:
    """Images N H W C, far from zero, as a network's may be."""
    torch.manual_seed(2)
    shape = (lanes * norm.lane_size, norm.height, norm.width, norm.channels)
    return [torch.randn(shape, device=DEVICE) + 3 * kind for kind in (1, 0, 0)[:kinds]]


def run_norm(name: str, lanes: int, images: list[Tensor]) -> dict[str, Tensor]:
    """All that the kernels give for `lanes` lanes."""
    norm, stats, given = make(name, lanes)
    z, residual, g = images
    table = z.new_zeros(lanes, 4 * norm.channels + 3)
    columns = [table[:, 1 + i * norm.channels : 1 + (i + 1) * norm.channels] for i in range(4)]
    running = given["running_mean"], given["running_var"]
    find_moments(norm, z, stats)
    statistics(norm, 0, given["gamma"], given["beta"], running, (columns[0], columns[1]), stats)
    y = bordered(torch.zeros_like(z).permute(0, 3, 1, 2), (1, 1))
    apply(norm, z, stats.factor, stats.shift, y, bordered(residual.permute(0, 3, 1, 2), (2, 0)), norm.rows)
    dz = bordered(torch.zeros_like(z).permute(0, 3, 1, 2), (0, 1))
    norm_grad(norm, g, z, stats, columns[2], columns[3], dz)
    names = ("running_mean", "running_var", "gamma", "beta")
    return {"y": y, "dz": dz, **dict(zip(names, columns, strict=True))}


@pytest.mark.parametrize(
    ("name", "joined"), [*((name, None) for name in CASES), ("many", 2), ("empty chunks", 2)]
)
def test_batch_norm_of_each_lane_is_the_reference(
    name: str, joined: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = 2
    for module in (norms, moments, norm_grads) if joined else ():
        monkeypatch.setattr(module, "JOINED", joined)  # more parts than are joined at once
    norm, _, given = make(name, lanes)
    z, residual, g = data(norm, lanes)
    found = run_norm(name, lanes, [z, residual, g])
    for lane in range(lanes):
        own = slice(lane * norm.lane_size, (lane + 1) * norm.lane_size)
        x = z[own].double().permute(0, 3, 1, 2).requires_grad_()
        gamma, beta = (given[key].double().requires_grad_() for key in ("gamma", "beta"))
        mean, var = given["running_mean"].double(), given["running_var"].double()
        middle = F.batch_norm(x, mean, var, gamma, beta, True, norm.momentum, norm.eps)
        out = middle + residual[own].double().permute(0, 3, 1, 2)
        out = out.relu() if norm.relu else out
        grad = g[own].double().permute(0, 3, 1, 2)
        by_x, by_gamma, by_beta = torch.autograd.grad(middle, (x, gamma, beta), grad)
        near(found["y"][own], bordered(out.detach(), (1, 1)))
        near(found["dz"][own], bordered(by_x, (0, 1)))
        expected = {"running_mean": mean, "running_var": var, "gamma": by_gamma, "beta": by_beta}
        for key, value in expected.items():
            near(found[key][lane], value)


@pytest.mark.parametrize("name", CASES)
def test_a_lanes_norm_does_not_depend_on_the_others(name: str) -> None:
    norm, _, _ = make(name, 4)
    images = data(norm, 4)
    together = run_norm(name, 4, images)
    for lane in range(4):
        own = slice(lane * norm.lane_size, (lane + 1) * norm.lane_size)
        alone = run_norm(name, 1, [image[own].contiguous() for image in images])
        for key, value in together.items():
            rows = own if key in ("y", "dz") else slice(lane, lane + 1)
            assert torch.equal(value[rows], alone[key]), key
