"""The gradient's norm against float64, in bits that no order or layout changes."""

import pytest
import torch

from lockstep.train.clip import clip_gradients, clip_values, gradient_norm

SHAPES = {"b": (3,), "a.weight": (4, 3, 5, 5), "scalar": (), "big": (3, 65536), "odd": (65537,), "none": (0,)}


def gradients() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def test_the_norm_equals_float64() -> None:
    grads = gradients()
    expected = torch.cat([g.double().flatten() for g in grads.values()]).norm()
    torch.testing.assert_close(gradient_norm(grads).double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "none"])
def test_every_gradient_counts(name: str) -> None:
    grads = gradients()
    before = gradient_norm(grads)
    grads[name].view(-1)[-1] += 1000
    assert gradient_norm(grads) > 900 > before / 2


def test_the_bits_do_not_depend_on_the_order_of_the_dict() -> None:
    generator = torch.Generator().manual_seed(0)
    grads = {f"p{index}": torch.randn(3, generator=generator) for index in range(40)}
    norm = gradient_norm(grads)
    for _ in range(20):
        order = torch.randperm(40, generator=generator).tolist()
        assert torch.equal(gradient_norm({f"p{index}": grads[f"p{index}"] for index in order}), norm)


def test_the_bits_do_not_depend_on_the_memory_format() -> None:
    grads = gradients()
    other = {k: g.to(memory_format=torch.channels_last) if g.dim() == 4 else g for k, g in grads.items()}
    assert not other["a.weight"].is_contiguous()
    assert torch.equal(gradient_norm(other), gradient_norm(grads))


def test_a_short_gradient_is_left_as_it_is() -> None:
    grads = gradients()
    clip_gradients(list(grads.values()), gradient_norm(grads), 1e9)
    assert all(torch.equal(g, before) for g, before in zip(grads.values(), gradients().values(), strict=True))


def test_a_long_gradient_is_scaled_to_the_limit() -> None:
    grads = gradients()
    norm = gradient_norm(grads)
    clip_gradients(list(grads.values()), norm, 2.5)
    total = torch.cat([g.double().flatten() for g in grads.values()]).norm()
    assert abs(float(total) - 2.5) < 1e-4
    for name, before in gradients().items():
        torch.testing.assert_close(grads[name], before * (2.5 / float(norm)), rtol=1e-6, atol=0)


def test_values_beyond_the_limit_are_moved_to_it() -> None:
    grads = gradients()
    clip_values(list(grads.values()), 0.5)
    for name, before in gradients().items():
        assert torch.equal(grads[name], before.clamp(-0.5, 0.5))
