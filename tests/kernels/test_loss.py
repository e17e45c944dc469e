"""Losses against float64 written out, and the sum over heads."""

import pytest
import torch
from torch import Tensor

from lockstep.kernels.loss import heads_loss, make_loss, squared_error
from lockstep.spec import Train


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 4, generator=generator).double(), torch.tensor([0, 3, 1, 1, 2, 0])


def probabilities(logits: Tensor) -> Tensor:
    return logits.exp() / logits.exp().sum(1, keepdim=True)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(batch, smoothing: float) -> None:
    logits, labels = batch
    target = torch.full((6, 4), smoothing / 4).double()
    target[torch.arange(6), labels] += 1 - smoothing
    expected = -(target * probabilities(logits).log()).sum(1).mean()
    torch.testing.assert_close(make_loss(Train(label_smoothing=smoothing))(logits, labels), expected)


def test_squared_error_is_the_distance_to_the_one_hot_label(batch) -> None:
    logits, labels = batch
    target = torch.zeros(6, 4).double()
    target[torch.arange(6), labels] = 1
    expected = ((probabilities(logits) - target) ** 2).sum(1).mean()
    torch.testing.assert_close(make_loss(Train(loss="squared_error"))(logits, labels), expected)


def test_one_head_is_the_loss_itself(batch) -> None:
    logits, labels = batch
    assert torch.equal(heads_loss(squared_error, logits, labels, 9.0), squared_error(logits.float(), labels))


def test_auxiliary_heads_count_by_their_weight(batch) -> None:
    logits, labels = batch
    heads = (logits, logits * 2, logits.flip(0))
    parts = [squared_error(head.float(), labels) for head in heads]
    expected = parts[0] + 0.3 * parts[1] + 0.3 * parts[2]
    assert torch.equal(heads_loss(squared_error, heads, labels, 0.3), expected)


def test_bf16_outputs_are_summed_in_fp32(batch) -> None:
    logits, labels = batch
    loss = heads_loss(make_loss(Train()), logits.bfloat16(), labels, 0.0)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, make_loss(Train())(logits.bfloat16().float(), labels))
