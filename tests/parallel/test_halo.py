"""Inner rows before the halo has come, and groups that are one worker's own: what is made and sent."""

import time
from functools import partial

import pytest
import torch
from torch import nn
from world import in_threads

from lockstep.comm.group import Group
from lockstep.parallel.split.axes import CHANNEL, Axes
from lockstep.parallel.split.layers import halo
from lockstep.parallel.split.layers.conv_function import convolve
from lockstep.parallel.split.layers.conv_piece import ConvForm
from lockstep.parallel.split.layers.row_buffer import RowParts
from lockstep.parallel.split.layers.split_conv import ConvCut
from lockstep.parallel.split.overlap import exchange_beside
from lockstep.parallel.split.spread import Spread, even_ranges

LAYERS = {
    "3x3": nn.Conv2d(4, 6, 3, padding=1),
    "strided": nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False),
    "resnet's first": nn.Conv2d(4, 6, 7, stride=2, padding=3),
    "1x1": nn.Conv2d(4, 6, 1, stride=2),
    "uneven": nn.Conv2d(4, 6, 3, padding=0),
    "transposed": nn.ConvTranspose2d(4, 6, 4, stride=2, padding=1),
    "transposed, dilated": nn.ConvTranspose2d(4, 6, 3, padding=2, dilation=2),
}
HAS_INNER_ROWS = set(LAYERS) - {"uneven"}
TOLERANCE = 1e-12


def compute(layer, call, x, dy):
    """What a call gives: output, and the gradients of the input and of a layer's parameters."""
    x = x.clone().requires_grad_()
    y = call(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], dy)]


def make_cut(axes, layer, x, y, given=(), made=()):
    sides = Spread(x.shape[2] * (axes.bands > 1), given), Spread(y.shape[2] * (axes.bands > 1), made)
    return ConvCut(axes, ConvForm.of(layer), *sides, x.shape[2], y.shape[2], x.shape[1], y.shape[1])


def near(found, true):
    assert found.shape == true.shape
    assert (found - true).abs().max() <= TOLERANCE * true.abs().max()


@pytest.mark.gloo
@pytest.mark.parametrize("inner_first", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_rows_over_workers_are_the_convolution(name, inner_first, monkeypatch):
    monkeypatch.setattr(halo, "EDGE_SHARE", 0)  # even if all rows are edges
    layer, generator = LAYERS[name].double(), torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, 48, 9, generator=generator, dtype=torch.float64)
    dy = torch.randn(layer(x).shape, generator=generator, dtype=torch.float64)
    y, dx, *sums = compute(layer, layer, x, dy)

    def work(group):
        axes = Axes(4, spatial=group)
        cut = make_cut(axes, layer, x, y)
        cut.inner_first &= {"forward", "input"} if inner_first else set()
        halos = cut.forward_halo, cut.input_halo
        assert [each.has_inner_rows for each in halos] == [name in HAS_INNER_ROWS] * 2
        mine = [axes.own_part(tensor, Spread(tensor.shape[2])).clone() for tensor in (x, y, dx, dy)]
        call = partial(convolve, cut, weight=layer.weight, bias=layer.bias)
        out, grad, *rest = compute(layer, call, mine[0], mine[3])
        near(out, mine[1])
        near(grad, mine[2])
        return rest

    for parts in zip(*in_threads(3, work), strict=True):
        near(sum(parts), sums.pop(0))


def test_what_is_computed_meanwhile_counts_as_no_exchange():
    def work(group):
        taken, mine = torch.zeros(3), torch.full((3,), float(group.rank))
        counts = [0 if rank == group.rank else 3 for rank in range(2)]
        took = exchange_beside(group, (taken, counts), (mine, counts), lambda: time.sleep(0.05))
        assert 0.05 <= took < 5
        return float(taken[0])

    assert in_threads(2, work) == [1.0, 0.0]


@pytest.mark.parametrize("bands", [1, 2])
@pytest.mark.parametrize(
    ("ins", "outs", "groups", "workers"), [(8, 8, 8, 2), (6, 12, 6, 3), (8, 4, 4, 2), (12, 12, 4, 3)]
)
def test_groups_of_ones_own_need_no_exchange(ins, outs, groups, workers, bands):
    layer = nn.Conv2d(ins, outs, 3, padding=1, groups=groups).double()
    x = torch.randn(2, ins, 16, 7, dtype=torch.float64)
    dy = torch.randn(2, outs, 16, 7, dtype=torch.float64)
    y, dx, *sums = compute(layer, layer, x, dy)
    given, made = (tuple((own,) for own in even_ranges(n, workers)) for n in (ins, outs))
    found = []
    for rank in range(workers):
        nobody = Group(rank, workers, host=object())  # whoever asks it for anything fails
        cut = make_cut(Axes(bands, channel=nobody), layer, x, y, given, made)
        if groups % workers:
            assert not cut.own_groups
            continue
        (own_in,), (own_out,) = given[rank], made[rank]
        parts = [x[:, own_in.start : own_in.stop], dy[:, own_out.start : own_out.stop].contiguous()]
        call = partial(convolve, cut, weight=layer.weight, bias=layer.bias)
        out, grad, *rest = compute(layer, call, *parts)
        near(out, y[:, own_out.start : own_out.stop])
        near(grad, dx[:, own_in.start : own_in.stop])
        found.append(rest)
        assert not cut.axes.clock.traffic[CHANNEL, ""].num_bytes
    for parts, true in zip(zip(*found, strict=True), sums if found else [], strict=True):
        near(sum(parts), true)


def test_rows_come_from_several_tensors_and_others_are_filled():
    image = torch.arange(20.0).view(1, 2, 10, 1)
    parts = RowParts(
        [range(1, 3), range(3, 6), range(6, 6)], [image[:, :, 1:3], image[:, :, 3:6], image[:, :, :0]]
    )
    assert torch.equal(parts.take(range(4, 6)), image[:, :, 4:6])
    found = parts.take(range(-1, 8), -5.0)
    assert torch.equal(found[:, :, 2:7], image[:, :, 1:6])
    assert (found[:, :, :2] == -5).all() and (found[:, :, 7:] == -5).all()
