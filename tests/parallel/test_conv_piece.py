"""Convolutions in pieces: a whole piece has the stock bits, and pieces put together are the convolution."""

import random
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.errors import ModelError
from lockstep.parallel.split.layers.conv_piece import ConvForm
from lockstep.parallel.split.layers.window import Window

FORMATS = [torch.contiguous_format, torch.channels_last]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}
LAYERS = {
    "3x3": nn.Conv2d(8, 12, 3, padding=1),
    "resnet's first": nn.Conv2d(3, 16, 7, stride=2, padding=3, bias=False),
    "1x1": nn.Conv2d(16, 8, 1, stride=2),
    "dilated": nn.Conv2d(4, 6, 3, padding=4, dilation=3),
    "grouped": nn.Conv2d(8, 12, (5, 3), stride=(3, 1), padding=(2, 1), groups=4),
    "depthwise": nn.Conv2d(6, 6, 3, padding="same", groups=6),
    "transposed": nn.ConvTranspose2d(6, 4, 4, stride=2, padding=1),
    "transposed, grouped": nn.ConvTranspose2d(6, 9, (3, 5), stride=(2, 3), output_padding=1, groups=3),
    "transposed, dilated": nn.ConvTranspose2d(4, 5, 3, stride=2, padding=2, dilation=2, output_padding=1),
    "transposed, one channel": nn.ConvTranspose2d(1, 3, 3, stride=2, padding=1),
    "gaps between windows": nn.Conv2d(3, 4, 2, stride=4, padding=1),
    "gaps, transposed": nn.ConvTranspose2d(3, 4, 2, stride=4, padding=1, output_padding=3),
}


@dataclass
class Convolution:
    """A form with its tensors, and what the stock calls make of them."""

    form: ConvForm
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    y: torch.Tensor
    dy: torch.Tensor
    dx: torch.Tensor
    dw: torch.Tensor

    @classmethod
    def make(cls, form, sizes, dtype, memory_format=torch.contiguous_format, bias=True):
        """`sizes` are images, input and output channels, rows and columns."""
        images, inputs, outputs, *size = sizes
        first, second = (inputs, outputs) if form.transposed else (outputs, inputs)
        generator = torch.Generator().manual_seed(sum(sizes))
        x = torch.randn(images, inputs, *size, generator=generator).to(dtype, memory_format=memory_format)
        weight = torch.randn(first, second // form.groups, *form.kernel, generator=generator)
        weight = weight.to(dtype, memory_format=memory_format)
        added = torch.randn(outputs, generator=generator).to(dtype) if bias else None
        y = stock(form, x.requires_grad_(), weight.requires_grad_(), added)
        dy = torch.empty_like(y).copy_(torch.randn(y.shape, generator=generator))
        dx, dw = torch.autograd.grad(y, (x, weight), dy)
        assert y.shape[2] == form.out_rows(size[0])
        return cls(form, x.detach(), weight.detach(), added, y.detach(), dy, dx, dw)

    def forward(self, bands, cuts, more=0):
        rows = []
        for out in deal(self.y.shape[2], bands):
            held = widen(self.form.forward_needs(out, self.x.shape[2]), more, self.x.shape[2])
            given = take(self.x, 2, held), held, self.weight, self.bias, out
            parts = [self.form.forward(*given, outs) for outs in cuts]
            rows.append(torch.cat(parts, 1))
        return torch.cat(rows, 2)

    def input_gradient(self, bands, cuts, more=0):
        rows = []
        for band in deal(self.x.shape[2], bands):
            held = widen(self.form.input_needs(band, self.y.shape[2]), more, self.y.shape[2])
            dy, width = take(self.dy, 2, held), self.x.shape[3]
            parts = [self.form.input_gradient(dy, held, self.weight, band, [ins], width) for ins in cuts]
            rows.append(torch.cat(parts, 1))
        return torch.cat(rows, 2)

    def weight_gradient(self, bands, cuts, more=0):
        rows, out_rows = self.x.shape[2], self.y.shape[2]
        parts = [torch.zeros((), dtype=self.x.dtype)] * len(cuts)
        for band in deal(rows if self.form.transposed else out_rows, bands):
            x_held, dy_held = self.form.weight_needs(band, rows, out_rows)
            x_held, dy_held = widen(x_held, more, rows), widen(dy_held, more, out_rows)
            x, dy = take(self.x, 2, x_held), take(self.dy, 2, dy_held)
            for number, outs in enumerate(cuts):
                own, shape = take(dy, 1, outs), self.weight.shape
                found = self.form.weight_gradient(x, x_held, own, dy_held, band, outs, shape)
                parts[number] = parts[number] + found
        return self.form.join_weights(parts, cuts)

    def check(self, bands, cuts, more=0):
        """Whether what is put together from pieces is the whole."""
        outs, ins = (deal(tensor.shape[1], cuts) for tensor in (self.y, self.x))
        near(self.forward(bands, outs, more), self.y)
        near(self.input_gradient(bands, ins, more), self.dx)
        near(self.weight_gradient(bands, outs, more), self.dw)


def deal(count, parts):
    return [range(part * count // parts, (part + 1) * count // parts) for part in range(parts)]


def widen(rows, more, count):
    return range(max(rows.start - more, 0), min(rows.stop + more, count)) if more else rows


def take(tensor, dim, part):
    return tensor.narrow(dim, part.start, len(part))


def stock(form, x, weight, bias):
    numbers = form.stride, form.padding
    if form.transposed:
        return F.conv_transpose2d(x, weight, bias, *numbers, form.output_padding, form.groups, form.dilation)
    return F.conv2d(x, weight, bias, *numbers, form.dilation, form.groups)


def near(found, true):
    assert found.shape == true.shape
    assert (found - true).abs().max() <= TOLERANCE[true.dtype] * true.abs().max()


def random_case(number):
    """A form and sizes, by a number; some windows lie in the padding alone."""
    draw = random.Random(number)
    while True:
        pairs = [(draw.randint(1, most), draw.randint(1, least)) for most, least in [(11, 4), (4, 3), (3, 2)]]
        kernel, stride, dilation = pairs
        padding, transposed = (draw.randint(0, 5), draw.randint(0, 2)), draw.random() < 0.4
        more = [draw.randrange(max(pair)) * transposed for pair in zip(stride, dilation, strict=True)]
        groups = draw.choice([1, 1, 2, 3])
        form = ConvForm(kernel, stride, padding, dilation, groups, transposed, tuple(more))
        rows, columns = draw.randint(7, 97), draw.randint(9, 14)
        if form.out_rows(rows) > 0:
            channels = [groups * draw.randint(1, 5) for _ in range(2)]
            return (
                form,
                (draw.randint(1, 3), *channels, rows, columns),
                draw.randint(2, 4),
                draw.randint(1, 4),
            )


@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_whole_piece_has_the_stock_bits(name, dtype, memory_format):
    layer = LAYERS[name]
    form = ConvForm.of(layer)
    sizes = 2, layer.in_channels, layer.out_channels, 23, 18
    case = Convolution.make(form, sizes, dtype, memory_format, layer.bias is not None)
    outs, ins = (deal(tensor.shape[1], 1) for tensor in (case.y, case.x))
    assert torch.equal(layer.to(dtype)(case.x), stock(form, case.x, layer.weight, layer.bias))
    found = [case.forward(1, outs), case.input_gradient(1, ins), case.weight_gradient(1, outs)]
    assert all(map(torch.equal, found, [case.y, case.dx, case.dw]))


@pytest.mark.parametrize("number", range(150))
def test_pieces_together_are_the_convolution(number):
    form, sizes, bands, cuts = random_case(number)
    dtype, memory_format = [torch.float64, torch.float32][number % 2], FORMATS[number // 2 % 2]
    Convolution.make(form, sizes, dtype, memory_format).check(bands, cuts, more=number % 3)


@pytest.mark.parametrize("bands", [2, 3, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_named_layers_in_pieces(name, bands):
    layer = LAYERS[name]
    sizes = 2, layer.in_channels, layer.out_channels, 23, 18
    Convolution.make(ConvForm.of(layer), sizes, torch.float64, bias=layer.bias is not None).check(bands, 2)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_halo_wider_than_the_band_beside_it(transposed):
    form = ConvForm((11, 3), (1, 1), (5, 1), (1, 1), 1, transposed, (0, 0))
    assert form.forward_needs(range(3, 5), 9) == range(9)
    Convolution.make(form, (2, 3, 4, 9, 8), torch.float64).check(4, 2)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("cuts", [[4, 8], [1, 3], [2, 9], [6, 7], [3, 11]], ids=str)
def test_channels_cut_inside_groups_and_across(cuts, transposed):
    form = ConvForm((3, 3), (2, 2), (1, 1), (1, 1), 3, transposed, (0, 0))
    case = Convolution.make(form, (2, 12, 12, 9, 8), torch.float64)
    ranges = [range(start, stop) for start, stop in zip([0, *cuts], [*cuts, 12], strict=True)]
    near(case.forward(2, ranges), case.y)
    near(case.input_gradient(2, ranges), case.dx)
    near(case.weight_gradient(2, ranges), case.dw)
    several, held = [ranges[0], ranges[2]], range(case.dy.shape[2])
    found = form.input_gradient(case.dy, held, case.weight, range(9), several, 8)
    near(found, torch.cat([take(case.dx, 1, ins) for ins in several], 1))


@pytest.mark.parametrize("name", LAYERS)
def test_pieces_lie_in_memory_as_what_they_are_made_of(name):
    layer = LAYERS[name]
    form, sizes = ConvForm.of(layer), (2, layer.in_channels, layer.out_channels, 23, 18)
    case = Convolution.make(form, sizes, torch.float32, torch.channels_last)
    held, out_rows = range(23), range(case.y.shape[2])
    for rows in (range(2, 5), range(23)):
        ins, outs = [range(1), range(1, layer.in_channels)], range(1, layer.out_channels)
        dx = form.input_gradient(case.dy, out_rows, case.weight, rows, ins, 18)
        out = out_rows if len(rows) == 23 else rows
        y = form.forward(case.x, held, case.weight, case.bias, out, outs)
        assert all(part.is_contiguous(memory_format=torch.channels_last) for part in (dx, y))


@pytest.mark.parametrize("transposed", [False, True])
def test_empty_ranges_make_empty_pieces(transposed):
    form = ConvForm((3, 3), (1, 1), (1, 1), (1, 1), 1, transposed, (0, 0))
    case = Convolution.make(form, (2, 3, 4, 7, 5), torch.float32)
    rows, none, weight = range(7), range(3, 3), case.weight
    assert form.forward(case.x, rows, weight, case.bias, range(2, 5), none).shape == (2, 0, 3, 5)
    assert form.forward(case.x, rows, weight, case.bias, none, range(4)).shape == (2, 4, 0, 5)
    assert form.forward(case.x, rows, weight, case.bias, rows, none).shape == (2, 0, 7, 5)
    assert form.input_gradient(case.dy, rows, weight, none, [range(3)], 5).shape == (2, 3, 0, 5)
    assert form.input_gradient(case.dy, rows, weight, rows, [none], 5).shape == (2, 0, 7, 5)
    no_rows = form.weight_gradient(case.x, rows, case.dy, rows, none, range(4), weight.shape)
    assert torch.equal(no_rows, torch.zeros_like(weight))
    dy = take(case.dy, 1, none)
    assert not form.weight_gradient(case.x, rows, dy, rows, rows, none, weight.shape).numel()


def test_what_cannot_be_cut_is_refused_in_one_line():
    with pytest.raises(ModelError, match=r"padding_mode 'circular'.*only 'zeros'"):
        ConvForm.of(nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"))
    with pytest.raises(ModelError, match=r"'same'.*choose an odd kernel"):
        ConvForm.of(nn.Conv2d(2, 2, 4, padding="same"))
    assert ConvForm.of(nn.Conv2d(2, 2, (5, 3), padding="same", dilation=2)).padding == (4, 2)
    assert ConvForm.of(nn.Conv2d(2, 2, 4, padding="valid")).padding == (0, 0)


def test_windows_against_their_definition():
    draw = random.Random(0)
    for _ in range(500):
        window = Window(*(draw.randint(*ends) for ends in [(1, 11), (1, 5), (0, 5), (1, 3)]))
        rows, outs, start = draw.randint(1, 30), draw.randint(1, 15), draw.randint(0, 14)
        firsts = [o * window.stride - window.padding for o in range(outs)]
        spans = [set(range(first, first + window.reach)) for first in firsts]
        out = range(min(start, outs), draw.randint(min(start, outs), outs))
        under = set().union(*spans[out.start : out.stop])
        frame, needs = window.frame(out), window.needs(out, rows)
        assert [*frame] == ([*range(min(under), max(under) + 1)] if under else [])
        assert [*needs] == [row for row in frame if 0 <= row < rows]
        ins = range(start, start + draw.randint(0, 9))
        touched = window.touched(ins, outs)
        assert 0 <= needs.start <= needs.stop <= rows and 0 <= touched.start <= touched.stop <= outs
        assert [*touched] == [o for o in range(outs) if spans[o] & set(ins)]
