"""Dropout by key: zeros and scaled values, a pure function of key and place."""

import pytest
import torch

from lockstep.kernels.dropout import dropout, dropout_channels


def test_an_element_is_zero_or_scaled() -> None:
    x = torch.rand(64, 500) + 1.0
    dropped = dropout(x, 0.3, key=1)
    kept = dropped != 0
    assert torch.equal(dropped[kept], x[kept] * torch.tensor(1.0 / 0.7))
    assert abs(float(kept.float().mean()) - 0.7) < 0.02


def test_the_mask_follows_the_key_and_nothing_else() -> None:
    x = torch.ones(8, 50)
    torch.manual_seed(0)
    first = dropout(x, 0.5, key=1)
    torch.manual_seed(1)
    assert torch.equal(dropout(x, 0.5, key=1), first)
    assert not torch.equal(dropout(x, 0.5, key=2), first)


def test_the_mask_does_not_depend_on_the_memory_format() -> None:
    x = torch.rand(2, 3, 4, 5)
    other = x.to(memory_format=torch.channels_last)
    assert torch.equal(dropout(x, 0.5, key=3), dropout(other, 0.5, key=3))


def test_channels_are_dropped_whole() -> None:
    x = torch.rand(16, 20, 3, 3) + 1.0
    dropped = dropout_channels(x, 0.5, key=1)
    whole = (dropped != 0).flatten(2).float().mean(2)
    assert set(whole.unique().tolist()) == {0.0, 1.0}
    kept = dropped != 0
    assert torch.equal(dropped[kept], 2 * x[kept])


@pytest.mark.parametrize("drop", [dropout, dropout_channels])
def test_probability_zero_keeps_and_one_drops_everything(drop) -> None:
    x = torch.rand(4, 5, 6) + 1.0
    assert torch.equal(drop(x, 0.0, 1), x)
    assert torch.equal(drop(x, 1.0, 1), torch.zeros_like(x))


@pytest.mark.parametrize("drop", [dropout, dropout_channels])
def test_the_gradient_goes_where_the_value_went(drop) -> None:
    x = torch.ones(6, 7, 8, requires_grad=True)
    dropped = drop(x, 0.4, 1)
    dropped.sum().backward()
    assert torch.equal(x.grad, dropped.detach())


def test_bf16_stays_bf16() -> None:
    assert dropout(torch.ones(8, dtype=torch.bfloat16), 0.5, 1).dtype == torch.bfloat16
