"""Mixup and cutmix: partners within a lane, one share a lane, and the loss of both labels."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.sample_mix import SampleMix
from lockstep.kernels.loss import WHOLE_SHARE, CrossEntropy, heads_loss, main_labels, squared_error

ROWS, COLS = 12, 10


def lanes(count=4, size=6):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(count * size, 3, ROWS, COLS, generator=generator)
    return images, torch.randint(0, 5, (count * size,), generator=generator)


@given(st.integers(0, 99), st.integers(0, 9), st.sampled_from(["mixup", "cutmix", "mixup,cutmix"]))
def test_a_lane_is_mixed_alike_with_others_and_alone(seed, step, items):
    images, labels = lanes()
    mix = SampleMix.parse(items.split(","), seed, (ROWS, COLS))
    whole = mix.apply(images, labels, 1, step, range(8, 12))
    for place, lane in enumerate(range(8, 12)):
        part = slice(6 * place, 6 * place + 6)
        alone = mix.apply(images[part], labels[part], 1, step, range(lane, lane + 1))
        assert alone[0].equal(whole[0][part]) and alone[1].equal(whole[1][part])
    without = mix.apply(torch.zeros(24, 0), labels, 1, step, range(8, 12))  # a stage that has no images
    assert without[1].equal(whole[1])


def test_mixup_blends_and_cutmix_pastes_by_the_share():
    images, labels = lanes(count=1)
    shares = set()
    for step in range(40):
        mixed, told = SampleMix.parse(["mixup:1"], 0, (ROWS, COLS)).apply(images, labels, 0, step, range(1))
        own, partner, share = told.unbind(1)
        assert own.equal(labels) and partner.equal(labels.flip(0)) and len(set(share.tolist())) == 1
        weight = int(share[0]) / WHOLE_SHARE
        assert torch.allclose(
            mixed.double(), images.double() * weight + images.flip(0).double() * (1 - weight)
        )
        shares.add(weight)
        pasted, told = SampleMix.parse(["cutmix"], 0, (ROWS, COLS)).apply(images, labels, 0, step, range(1))
        from_own = (pasted == images).all(1)  # of every pixel
        assert (from_own | (pasted == images.flip(0)).all(1)).all()
        kept = from_own.double().mean((1, 2))
        assert torch.allclose(kept, told[:, 2].double() / WHOLE_SHARE, atol=1e-3)
    assert min(shares) < 0.2 and max(shares) > 0.8


@pytest.mark.parametrize("loss", [CrossEntropy(0.1), squared_error])
def test_the_loss_is_that_of_both_labels(loss):
    logits = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    _, labels = lanes(count=1)
    mixed = torch.stack([labels, labels.flip(0), torch.full((6,), 256)], 1)
    found = heads_loss(loss, (logits, logits), mixed, 0.5)
    wanted = 1.5 * (0.25 * loss(logits.float(), labels) + 0.75 * loss(logits.float(), labels.flip(0)))
    assert torch.allclose(found, wanted)
    assert main_labels(mixed).equal(labels.flip(0)) and main_labels(labels) is labels
    whole = torch.stack([labels, labels.flip(0), torch.full((6,), WHOLE_SHARE)], 1)
    assert heads_loss(loss, logits, whole, 0.0).equal(loss(logits.float(), labels))
