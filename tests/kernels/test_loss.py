"""Losses against float64 written out, and the sum over heads."""

import pytest
import torch
from torch import Tensor

from lockstep.kernels.loss import heads_loss, make_loss, plain_loss, squared_error
from lockstep.kernels.triton.softmax_loss import cross_entropy
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


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_weights_of_classes_are_those_of_the_samples(batch, smoothing: float) -> None:
    logits, labels = batch
    weights = (0.5, 3.0, 1.0, 0.0)
    plain = make_loss(Train(label_smoothing=smoothing))
    expected = sum(weights[y] * plain(logits[i : i + 1], labels[i : i + 1]) for i, y in enumerate(labels)) / 6
    weighted = make_loss(Train(label_smoothing=smoothing), weights)
    torch.testing.assert_close(weighted(logits, labels), expected)
    assert plain_loss(weighted) == plain and plain_loss(plain) is plain
    mixed = torch.stack([labels, labels.flip(0), torch.full_like(labels, 256)], 1)  # a quarter is its own
    both = 0.25 * weighted(logits.float(), labels) + 0.75 * weighted(logits.float(), labels.flip(0))
    torch.testing.assert_close(heads_loss(weighted, logits, mixed, 0.0), both)


def test_rows_of_values(batch) -> None:
    logits, _ = batch
    outputs, there = logits, (logits.flip(0) > 0).double()
    p = 1 / (1 + (-outputs).exp())
    gap = (outputs - there).abs()
    expected = {
        "binary_cross_entropy": -(there * p.log() + (1 - there) * (1 - p).log()).mean(),
        "mse": gap.square().mean(),
        "l1": gap.mean(),
        "huber": torch.where(gap < 1, gap.square() / 2, gap - 0.5).mean(),
    }
    for name, value in expected.items():
        loss = make_loss(Train(loss=name))
        torch.testing.assert_close(loss(outputs, there), value.float())
        heads = heads_loss(loss, (outputs, outputs * 0), there, 0.3)
        torch.testing.assert_close(heads, loss(outputs, there) + 0.3 * loss(outputs * 0, there))
    one = make_loss(Train(loss="mse"))(outputs[:, :1], there[:, 0])  # a number for each sample
    torch.testing.assert_close(one, gap[:, 0].square().mean().float())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", [None, (0.5, 3.0, 1.0, 0.0)])
def test_our_kernel_is_the_mean_of_each_lane(batch, smoothing: float, weights) -> None:
    """Each sample's loss, whether it is right, and the gradient of the mean over each of two lanes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits, labels = batch
    wanted = logits.clone().requires_grad_()
    loss = make_loss(Train(label_smoothing=smoothing), weights)
    parts = [loss(wanted[i : i + 3], labels[i : i + 3]) for i in (0, 3)]
    (grad,) = torch.autograd.grad(sum(parts), wanted)
    given = logits.float().to(device), labels.int().to(device)
    table = None if weights is None else torch.tensor(weights, device=device)
    losses, right, found = (torch.empty(*shape, device=device) for shape in ((6,), (6,), (6, 4)))
    cross_entropy(*given, losses, right, found, 3, smoothing, weights=table)
    torch.testing.assert_close(losses.cpu().view(2, 3).mean(1).double(), torch.stack(parts).detach())
    torch.testing.assert_close(found.cpu().double(), grad)
    assert right.cpu().tolist() == (logits.argmax(1) == labels).float().tolist()
