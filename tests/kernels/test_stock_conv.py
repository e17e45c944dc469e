"""Stock convolutions, groups one by one: against the same in float64."""

import pytest
import torch
from torch.nn import functional as F

from lockstep.kernels.stock.stock_conv import lying_last, stock_conv, stock_conv_backward

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
