"""Strided 1×1 convolutions with channels last and few channels, whose stock weight gradient damages the heap.

The stock call is not made here: it would end this process, or spoil it for the tests that follow.
"""

import pytest
import torch

from lockstep.parallel.split.layers.conv_piece import ConvForm
from lockstep.parallel.split.layers.pointwise import is_unsafe, under_windows

SIZES = {(2, 2): (240, 64), (3, 1): (360, 32), (1, 4): (120, 128)}


def sides(stride, channels, others, memory_format=torch.channels_last):
    """The side over which windows move, which they fill, and the other one."""
    generator = torch.Generator().manual_seed(channels)
    shapes = (2, channels, *SIZES[stride]), (2, others, 120, 32)
    return (torch.randn(s, generator=generator).to(memory_format=memory_format) for s in shapes)


def form_of(stride, transposed):
    more = (stride[0] - 1, stride[1] - 1) if transposed else (0, 0)
    return ConvForm((1, 1), stride, (0, 0), (1, 1), 1, transposed, more)


@pytest.fixture
def calls(monkeypatch):
    """The strides of the calls made; what is not safe is not made but fails."""
    seen, stock = [], torch.ops.aten.convolution_backward

    def watched(dy, x, weight, bias, stride, *rest):
        assert not is_unsafe(x, dy, stride)
        seen.append(stride)
        return stock(dy, x, weight, bias, stride, *rest)

    monkeypatch.setattr(torch.ops.aten, "convolution_backward", watched)
    return seen


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("stride", SIZES, ids=str)
@pytest.mark.parametrize("channels", [1, 5, 15])
def test_the_gradient_is_made_without_the_stride(channels, stride, transposed, calls):
    wide, narrow = sides(stride, channels, 17)
    x, dy = (narrow, wide) if transposed else (wide, narrow)
    pixels, others = wide[:, :, :: stride[0], :: stride[1]].double(), narrow.double()
    true = torch.einsum("nihw,nohw->io", others, pixels)  # of both forms, the narrow side is the first
    form = form_of(stride, transposed)
    held = range(x.shape[2]), range(dy.shape[2])
    band, outs = held[0 if transposed else 1], range(dy.shape[1])
    found = form.weight_gradient(x, held[0], dy, held[1], band, outs, (*true.shape, 1, 1))
    assert calls == [(1, 1)]
    assert (found[:, :, 0, 0] - true).abs().max() <= 2e-5 * true.abs().max()


def test_other_calls_are_stock():
    stride = (2, 2)
    wide, narrow = sides(stride, 5, 17)
    assert is_unsafe(wide, narrow, stride) and is_unsafe(narrow, wide, stride)
    assert not is_unsafe(wide, narrow, (1, 1))
    assert not is_unsafe(wide[:, :, 1:], narrow, stride)  # the last window ends with the image
    assert not is_unsafe(*sides(stride, 16, 17), stride)
    assert not is_unsafe(*sides(stride, 5, 17, torch.contiguous_format), stride)


def test_pixels_under_windows_lie_in_memory_as_before():
    wide, narrow = sides((2, 2), 5, 17)
    found, same = under_windows(wide, narrow)
    assert same.data_ptr() == narrow.data_ptr() and torch.equal(found, wide[:, :, ::2, ::2])
    assert found.is_contiguous(memory_format=torch.channels_last)
