"""Local response normalization against torch's own, in float64."""

import pytest
import torch
from torch.nn import functional as F

from lockstep.kernels.lrn import LRN, lrn

CASES = [  # shape, size
    ((2, 16, 5, 7), 5),
    ((3, 3, 4, 4), 5),  # fewer channels than the window
    ((1, 1, 2, 3), 5),
    ((2, 9, 3, 3), 4),  # an even window is not symmetric
    ((2, 2, 3, 3), 4),
    ((2, 6, 2, 2), 1),
    ((4, 7, 6), 3),  # one dimension after the channels
    ((1, 96, 3, 5), 5),
]


@pytest.mark.parametrize(("shape", "size"), CASES)
def test_equals_torch_forward_and_gradient(shape: tuple[int, ...], size: int) -> None:
    torch.manual_seed(sum(shape) + size)
    ours = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()
    # An alpha of order 1 makes the window weigh, so that a wrong one shows.
    constants = {"alpha": 1.3, "beta": 0.75, "k": 2.0}
    out = lrn(ours, size, **constants)
    expected = F.local_response_norm(theirs, size, **constants)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-14)
    grad = torch.randn(shape, dtype=torch.float64)
    out.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-11, atol=1e-13)


def test_random_shapes() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        n, c, h, w, size = (int(torch.randint(1, 9, (), generator=generator)) for _ in range(5))
        x = torch.randn(n, c, h, w, dtype=torch.float64, generator=generator)
        expected = F.local_response_norm(x, size, 0.7, 0.6, 1.5)
        torch.testing.assert_close(lrn(x, size, 0.7, 0.6, 1.5), expected, rtol=1e-12, atol=1e-14)


def test_gradient_is_the_derivative() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 6, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: lrn(t, 4, 1.3, 0.75, 2.0), (x,))


def test_layer_is_the_function_with_its_constants() -> None:
    x = torch.randn(2, 8, 3, 3)
    layer = LRN(3, alpha=0.5, beta=0.6, k=1.5)
    assert torch.equal(layer(x), lrn(x, 3, 0.5, 0.6, 1.5))
    assert repr(layer) == "LRN(3, alpha=0.5, beta=0.6, k=1.5)"


def test_defaults_are_torchs() -> None:
    x = torch.randn(2, 8, 3, 3, dtype=torch.float64)
    torch.testing.assert_close(lrn(x), F.local_response_norm(x, 5), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_does_not_overflow(dtype: torch.dtype) -> None:
    x = torch.full((1, 8, 2, 2), 300.0, dtype=dtype, requires_grad=True)
    out = lrn(x, 5, 1e-4, 0.75, 1.0)  # 300² is beyond fp16
    out.sum().backward()
    expected = F.local_response_norm(x.detach().double(), 5)
    assert out.dtype == x.grad.dtype == dtype
    torch.testing.assert_close(out.detach().double(), expected, rtol=1e-2, atol=0)
    assert torch.isfinite(x.grad).all()


def test_a_sample_does_not_depend_on_its_batch() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 12, 5, 5)
    assert torch.equal(lrn(x)[4:5], lrn(x[4:5].clone()))


def test_channels_last_gives_the_same_bits() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 12, 5, 5)
    assert torch.equal(lrn(x), lrn(x.to(memory_format=torch.channels_last)))


def test_vmap_over_samples() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 2, 8, 4, 4)
    torch.testing.assert_close(torch.vmap(lrn)(x), torch.stack([lrn(part) for part in x]))
