"""Augmentation against a slow reference, pixel by pixel, and its purity."""

import pytest
import torch
from torch import Tensor

from lockstep.data.augment import Augment
from lockstep.kernels import random

SEED, EPOCH = 5, 3


def make(names: list[str], channels: int = 2, size: int = 6) -> Augment:
    return Augment.parse(names, SEED, size, (0.0,) * channels, (1.0,) * channels)


def images(num: int, shape: tuple[int, int, int] = (2, 6, 5)) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 256, (num, *shape), dtype=torch.uint8, generator=generator)


def draw(what: str, sample: int, bound: int) -> int:
    base = random.key("augment", SEED, EPOCH, what)
    return int(random.integers(base, torch.tensor([sample]), bound))


def moved(image: Tensor, sample: int, flip: bool, padding: int) -> Tensor:
    """Pad with zeros, cut a window out, then mirror it as drawn."""
    channels, height, width = image.shape
    down = draw("crop-row", sample, 2 * padding + 1) - padding if padding else 0
    right = draw("crop-col", sample, 2 * padding + 1) - padding if padding else 0
    mirror = bool(draw("flip", sample, 2)) if flip else False
    out = torch.zeros_like(image)
    for c in range(channels):
        for y in range(height):
            for x in range(width):
                from_y, from_x = y + down, x + right
                if mirror:
                    from_x = width - 1 - from_x
                if 0 <= from_y < height and 0 <= from_x < width:
                    out[c, y, x] = image[c, from_y, from_x]
    return out


@pytest.mark.parametrize(
    ("names", "flip", "padding"),
    [(["flip"], True, 0), (["crop:2"], False, 2), (["flip", "crop:1"], True, 1), (["crop:9"], False, 9)],
)
def test_flip_and_crop_equal_the_slow_reference(names: list[str], flip: bool, padding: int) -> None:
    raw, ids = images(12), torch.arange(100, 112)
    out = make(names).apply(raw, ids, EPOCH)
    for row in range(12):
        expected = moved(raw[row], int(ids[row]), flip, padding)
        assert torch.equal(out[row], expected.float() * torch.tensor(1 / 255))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 20])
def test_cutout_zeroes_a_square_around_the_drawn_centre(size: int) -> None:
    raw, ids = images(10), torch.arange(50, 60)
    augment = make([f"cutout:{size}"])
    plain, out = augment.normalize(raw), augment.apply(raw, ids, EPOCH)
    for row, sample in enumerate(ids.tolist()):
        top = draw("cutout-row", sample, 6) - size // 2
        left = draw("cutout-col", sample, 5) - size // 2
        for y in range(6):
            for x in range(5):
                inside = top <= y < top + size and left <= x < left + size
                expected = torch.zeros(2) if inside else plain[row, :, y, x]
                assert torch.equal(out[row, :, y, x], expected)


def test_both_mirrored_and_straight_images_occur() -> None:
    raw = images(1).expand(200, -1, -1, -1)
    out = make(["flip"]).apply(raw, torch.arange(200), EPOCH)
    mirrored = (out == make([]).normalize(raw.flip(3))).flatten(1).all(1)
    assert 70 < int(mirrored.sum()) < 130


@pytest.mark.parametrize("names", [["flip"], ["crop"], ["cutout"], ["flip", "crop", "cutout"]])
def test_a_sample_does_not_depend_on_its_batch_or_place(names: list[str]) -> None:
    augment, raw, ids = make(names), images(20), torch.arange(20)
    whole = augment.apply(raw, ids, EPOCH)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))[:7]
    assert torch.equal(augment.apply(raw[order], ids[order], EPOCH), whole[order])
    assert torch.equal(augment.apply(raw[3:4], ids[3:4], EPOCH), whole[3:4])


@pytest.mark.parametrize("name", ["flip", "crop", "cutout"])
def test_another_epoch_or_seed_or_sample_gets_another_result(name: str) -> None:
    raw = images(1).expand(30, -1, -1, -1)
    ids = torch.arange(30)
    first = make([name]).apply(raw, ids, EPOCH)
    other_seed = Augment.parse([name], SEED + 1, 6, (0.0, 0.0), (1.0, 1.0))
    assert not torch.equal(make([name]).apply(raw, ids, EPOCH + 1), first)
    assert not torch.equal(other_seed.apply(raw, ids, EPOCH), first)
    assert not torch.equal(make([name]).apply(raw, ids + 30, EPOCH), first)


def test_the_global_generator_is_neither_read_nor_moved() -> None:
    augment, raw, ids = make(["flip", "crop", "cutout"]), images(8), torch.arange(8)
    torch.manual_seed(0)
    before, first = torch.get_rng_state(), augment.apply(raw, ids, EPOCH)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(augment.apply(raw, ids, EPOCH), first)


def test_normalize_bytes_in_float64() -> None:
    augment = Augment.parse([], SEED, 6, (0.3, 0.5), (0.2, 0.7))
    raw = images(4)
    mean, std = torch.tensor([0.3, 0.5]).double(), torch.tensor([0.2, 0.7]).double()
    expected = (raw.double() / 255 - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)
    out = augment.normalize(raw)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-6)


def test_normalize_does_not_divide_floats_by_255() -> None:
    raw = torch.rand(2, 2, 3, 3)
    assert torch.equal(make([]).normalize(raw), raw)


def test_pixels_default_to_a_share_of_the_size() -> None:
    augment = Augment.parse(["flip", "crop", "cutout"], 0, 32, (0.0,), (1.0,))
    assert (augment.flip, augment.crop_padding, augment.cutout) == (True, 4, 8)
    tiny = Augment.parse(["crop", "cutout"], 0, 2, (0.0,), (1.0,))
    assert (tiny.flip, tiny.crop_padding, tiny.cutout) == (False, 1, 1)
    given = Augment.parse(["crop:7", "cutout:3"], 0, 32, (0.0,), (1.0,))
    assert (given.crop_padding, given.cutout) == (7, 3)
