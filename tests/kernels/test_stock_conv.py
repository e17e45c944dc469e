"""Stock convolutions, groups one by one, and depthwise ones of ours: against the same in float64."""

from typing import Any

import pytest
import torch
from images import DEVICE
from torch.nn import functional as F

from lockstep.comm.tree import LaneTree
from lockstep.kernels.stock.depthwise_op import depthwise, depthwise_data_grad, depthwise_filter_grad
from lockstep.kernels.stock.stock_conv import lying_last, stock_conv, stock_conv_backward

_LAST = torch.channels_last
OPTIONS = (1, 1), (1, 1), (1, 1)


@pytest.mark.parametrize(
    ("groups", "channels", "out"), [(2, 64, 32), (4, 128, 64), (2, 8, 8), (8, 64, 64), (1, 32, 16)]
)
def test_groups_are_one_convolution(groups: int, channels: int, out: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, channels, 5, 7).contiguous(memory_format=torch.channels_last)
    w = torch.randn(out, channels // groups, 3, 3).contiguous(memory_format=torch.channels_last)
    exact_x, exact_w = x.double().requires_grad_(), w.double().requires_grad_()
    exact = F.conv2d(exact_x, exact_w, None, *OPTIONS, groups)
    g = torch.randn(exact.shape)
    exact.backward(g.double())
    options = *OPTIONS, groups
    torch.testing.assert_close(stock_conv(x, w, options).double(), exact.detach(), rtol=1e-5, atol=1e-4)
    for which, wanted in enumerate((exact_x.grad, exact_w.grad)):
        found = stock_conv_backward(g, x, w, options, which)
        assert found.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-4)


def test_strides_that_say_nothing_are_alike() -> None:
    """With one channel they may be those of either format, by which torch chooses its kernels."""
    x = torch.randn(2, 1, 8, 8)
    other = x.as_strided(x.shape, (64, 1, 8, 1))
    assert x.stride() != other.stride()
    for given in (x, other):
        assert lying_last(given).stride() == (64, 1, 8, 1) and torch.equal(lying_last(given), x)


DEEP = {  # channels, image, kernel, stride, padding, dilation, samples of a lane
    "3x3": (16, (6, 7), (3, 3), (1, 1), (1, 1), (1, 1), 2),
    "7x7": (20, (5, 6), (7, 7), (1, 1), (3, 3), (1, 1), 1),
    "strides": (5, (9, 7), (5, 3), (2, 1), (2, 0), (1, 2), 2),
    "wide": (33, (5, 5), (2, 5), (2, 2), (1, 2), (1, 1), 1),
    "pixel": (40, (3, 5), (1, 1), (1, 1), (0, 0), (1, 1), 2),
    "chunks": (3, (12, 11), (2, 1), (1, 1), (0, 0), (3, 1), 2),
    "large": (4, (9, 7), (9, 2), (1, 1), (4, 1), (1, 1), 1),
}
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("case", DEEP.values(), ids=DEEP)
def test_each_channel_by_a_filter_of_its_own(case: tuple[Any, ...], dtype: torch.dtype) -> None:
    """In 16 bits, up to 8 taps a side, the weight gradient is by matrix units; two lanes at once are two."""
    (channels, image, kernel, *options, lane), lanes = case, 2
    generator = torch.Generator().manual_seed(0)
    x, w = (
        torch.randn(shape, generator=generator).to(dtype).to(DEVICE).contiguous(memory_format=_LAST)
        for shape in ((lane * lanes, channels, *image), (channels, 1, *kernel))
    )
    exact_x, exact_w = x.double().requires_grad_(), w.double().requires_grad_()
    exact = F.conv2d(exact_x, exact_w, None, *options, channels)
    g = torch.randn(exact.shape, generator=generator).to(dtype).to(DEVICE).contiguous(memory_format=_LAST)
    exact.backward(g.double())
    near = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(depthwise(x, w, *options).double(), exact.detach(), rtol=near, atol=near)
    by_x = depthwise_data_grad(g, x, w, *options)
    torch.testing.assert_close(by_x.double(), exact_x.grad, rtol=near, atol=near)
    by_w = depthwise_filter_grad(g, x, w, *options, lane, lanes)
    torch.testing.assert_close(by_w.double(), exact_w.grad, rtol=1e-5, atol=1e-4)
    tree = LaneTree()
    for one_g, one_x in zip(g.split(lane), x.split(lane), strict=True):
        tree.add([depthwise_filter_grad(one_g, one_x, w, *options, lane, lanes)])
    assert torch.equal(by_w, tree.root()[1][0])
