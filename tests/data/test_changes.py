"""Changes of images against Pillow, colorsys and float64 references, and their independence of the batch."""

import colorsys
import hashlib
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from lockstep.data.changes import Changes, blur, color, geometry, group_change, policy, tone
from lockstep.data.changes.sample_draw import SampleDraw
from lockstep.kernels import random
from lockstep.spec.sample.augmentation import CHANGES

SEED, EPOCH = 5, 3
MEAN = (0.5, 0.4, 0.3)
EVERYTHING = (
    "rand_augment",
    "trivial_augment",
    "color_jitter:0.4:0.4:0.4:0.2",
    "grayscale:0.3",
    "gaussian_blur",
    "random_erasing",
)
NAMES = (
    "identity",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
    "rotate",
    "brightness",
    "color",
    "contrast",
    "sharpness",
    "posterize",
    "solarize",
    "autocontrast",
    "equalize",
)


def make_images(num: int, channels: int = 3, height: int = 21, width: int = 26) -> Tensor:
    """Waves with noise, each image with levels of its own; the first image has one colour."""
    generator = torch.Generator().manual_seed(height)
    y, x = torch.arange(height)[:, None], torch.arange(width)
    waves = torch.stack([torch.sin(x / (3 + c) + y / 5) for c in range(channels)])
    noise = torch.randn((num, channels, height, width), generator=generator)
    depth = torch.linspace(0, 120, num)[:, None, None, None]
    return (110 + depth * waves + depth / 4 * noise).clamp(0, 255).to(torch.uint8)


def make(*items: str) -> Changes:
    changes = Changes.parse(items, SEED, MEAN)
    assert changes is not None
    return changes


def to_pillow(image: Tensor) -> Image.Image:
    array = image.permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(array[..., 0] if len(image) == 1 else array)


def from_pillow(image: Image.Image) -> Tensor:
    array = torch.from_numpy(np.array(image))
    return array[None] if array.ndim == 2 else array.permute(2, 0, 1)


def draw(what: str, sample: int, bound: int) -> int:
    return int(random.integers(random.key("augment", SEED, EPOCH, what), torch.tensor([sample]), bound))


def shifted(image: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST)


def by_pillow(image: Image.Image, name: str, place: int, sign: int, wide: bool) -> Image.Image:
    """An operation of torchvision's RandAugment or TrivialAugmentWide, by Pillow, as torchvision calls it."""
    part = sign * place / 30
    factor = 1 + round(4096 * (0.99 if wide else 0.9) * part) / 4096
    slope = (0.99 if wide else 0.3) * part
    right, down = ((32 if wide else 150 / 331 * side) * part for side in image.size)
    return {
        "identity": lambda: image,
        "shear_x": lambda: shifted(image, (1, slope, 0, 0, 1, 0)),
        "shear_y": lambda: shifted(image, (1, 0, 0, slope, 1, 0)),
        "translate_x": lambda: shifted(image, (1, 0, -int(right), 0, 1, 0)),
        "translate_y": lambda: shifted(image, (1, 0, 0, 0, 1, -int(down))),
        "rotate": lambda: image.rotate((135 if wide else 30) * part),
        "brightness": lambda: ImageEnhance.Brightness(image).enhance(factor),
        "color": lambda: ImageEnhance.Color(image).enhance(factor),
        "contrast": lambda: ImageEnhance.Contrast(image).enhance(factor),
        "sharpness": lambda: ImageEnhance.Sharpness(image).enhance(factor),
        "posterize": lambda: ImageOps.posterize(image, 8 - round((6 if wide else 4) * place / 30)),
        "solarize": lambda: ImageOps.solarize(image, 255 * (30 - place) / 30),
        "autocontrast": lambda: ImageOps.autocontrast(image),
        "equalize": lambda: ImageOps.equalize(image),
    }[name]()


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
def test_an_operation_equals_pillow_at_every_magnitude(name: str, wide: bool, channels: int) -> None:
    images = make_images(62, channels)
    entry = policy._operations(wide, *images.shape[2:])[NAMES.index(name)]
    assert entry is not None
    operation, values = entry
    out = operation(images, values)
    for row, (sign, place) in enumerate(itertools.product((1, -1), range(31))):
        expected = from_pillow(by_pillow(to_pillow(images[row]), name, place, sign, wide))
        assert torch.equal(out[row], expected), (sign, place)


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (2, 2), (3, 3), (40, 9)])
@pytest.mark.parametrize("name", NAMES[1:])
def test_operations_take_any_size(name: str, shape: tuple[int, int]) -> None:
    images = make_images(5, 3, *shape)
    operation, values = policy._operations(False, *shape)[NAMES.index(name)] or (None, None)
    out = operation(images, values[20:25])
    for row, place in enumerate(range(20, 25)):
        assert torch.equal(out[row], from_pillow(by_pillow(to_pillow(images[row]), name, place, 1, False)))


def test_solarize_from_0_inverts() -> None:
    images = make_images(4)
    out = tone.solarize(images, torch.zeros(4, dtype=torch.int64))
    for image, inverted in zip(images, out, strict=True):
        assert torch.equal(inverted, from_pillow(ImageOps.invert(to_pillow(image))))


def test_gray_equals_pillow() -> None:
    images = make_images(8)
    for image, gray in zip(images, tone.gray(images, images), strict=True):
        assert torch.equal(gray, from_pillow(to_pillow(image).convert("L").convert("RGB")))


def test_hue_equals_colorsys() -> None:
    levels = torch.tensor([0, 1, 77, 128, 254, 255])
    images = torch.cartesian_prod(levels, levels, levels).T.reshape(1, 3, 12, 18).to(torch.uint8)
    for angle in (0, 1, 999, 4096, 12288, 20000, color.CIRCLE - 1):
        out = color.hue(images, torch.tensor([angle]))
        pixels = zip(images[0].flatten(1).T.tolist(), out[0].flatten(1).T.tolist(), strict=True)
        for before, after in pixels:
            hue, saturation, value = colorsys.rgb_to_hsv(*(level / 255 for level in before))
            expected = colorsys.hsv_to_rgb((hue + angle / color.CIRCLE) % 1, saturation, value)
            assert max(abs(255 * a - b) for a, b in zip(expected, after, strict=True)) < 0.5 + 1e-9
    assert torch.equal(color.hue(images, torch.tensor([0])), images)


@pytest.mark.parametrize("shape", [(1, 1), (2, 9), (30, 17)])
def test_blur_equals_a_float64_reference(shape: tuple[int, int]) -> None:
    radii, weights = blur._kernels(0.1, 2.0)
    images = make_images(64, 3, *shape)
    for level in range(0, 64, 7):
        sigma, radius = 0.1 + 1.9 * (level + 0.5) / 64, int(radii[level])
        assert radius >= 3 * sigma
        kernel = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
        kernel /= kernel.sum()
        expected = images[level].double().numpy()
        for axis in (1, 2):
            pads = [(radius, radius) if axis == other else (0, 0) for other in range(3)]
            mirrored = np.pad(expected, pads, mode="reflect")
            expected = np.apply_along_axis(np.convolve, axis, mirrored, kernel, "valid")
        out = blur.blur(images[level : level + 1], weights[level : level + 1, : radius + 1])
        assert np.abs(out[0].numpy() - expected).max() < 0.6


def test_rand_augment_applies_what_is_drawn() -> None:
    images, ids = make_images(24), torch.arange(100, 124)
    out = make("rand_augment:3:17").apply(images, ids, EPOCH)
    for image, sample, changed in zip(images, ids.tolist(), out, strict=True):
        expected = to_pillow(image)
        for turn in range(3):
            name = NAMES[draw(f"rand_augment-{turn}-operation", sample, 14)]
            sign = 1 - 2 * draw(f"rand_augment-{turn}-sign", sample, 2)
            expected = by_pillow(expected, name, 17, sign, False)
        assert torch.equal(changed, from_pillow(expected))


def test_trivial_augment_applies_what_is_drawn() -> None:
    images, ids = make_images(40), torch.arange(40)
    out = make("trivial_augment").apply(images, ids, EPOCH)
    for image, sample, changed in zip(images, ids.tolist(), out, strict=True):
        name, place = (
            NAMES[draw("trivial_augment-operation", sample, 14)],
            draw("trivial_augment-bin", sample, 31),
        )
        sign = 1 - 2 * draw("trivial_augment-sign", sample, 2)
        assert torch.equal(changed, from_pillow(by_pillow(to_pillow(image), name, place, sign, True)))


def test_color_jitter_applies_what_is_drawn_in_the_order_drawn() -> None:
    images, ids = make_images(24), torch.arange(50, 74)
    out = make("color_jitter:0.5:1.5:0.25").apply(images, ids, EPOCH)
    enhancers = (
        ("brightness", ImageEnhance.Brightness, 0.5),
        ("contrast", ImageEnhance.Contrast, 1.5),
        ("saturation", ImageEnhance.Color, 0.25),
    )
    for image, sample, changed in zip(images, ids.tolist(), out, strict=True):
        expected = to_pillow(image)
        order = list(itertools.permutations(range(4)))[draw("color_jitter-order", sample, 24)]
        for place in order:
            if place < 3:
                name, enhancer, most = enhancers[place]
                low, high = round(4096 * max(1 - most, 0)), round(4096 * (1 + most))
                factor = (low + draw(f"color_jitter-{name}", sample, high - low + 1)) / 4096
                expected = enhancer(expected).enhance(factor)
        assert torch.equal(changed, from_pillow(expected))


@pytest.mark.parametrize("channels", [1, 3])
def test_erasing_fills_one_rectangle_with_the_mean(channels: int) -> None:
    images = torch.full((3000, channels, 40, 30), 255, dtype=torch.uint8)
    changes = Changes.parse(["random_erasing:0.6"], SEED, MEAN[:channels])
    assert changes is not None
    out = changes.apply(images, torch.arange(3000), EPOCH)
    holes = (out != 255).any(1)
    rows, cols = holes.any(2).sum(1), holes.any(1).sum(1)
    assert torch.equal(rows * cols, holes.sum((1, 2)))  # a full rectangle
    assert rows.max() < 40 and cols.max() < 30
    assert abs(float((rows > 0).double().mean()) - 0.6) < 0.05
    share = (rows * cols)[rows > 0] / 1200
    assert 0.01 < share.min() < 0.04 and 0.28 < share.max() < 0.36
    assert set(out[:, 0].unique().tolist()) == {128, 255}
    assert out[:, -1].min() == round(255 * MEAN[channels - 1])


@settings(max_examples=15, deadline=None)
@given(rows=st.lists(st.integers(0, 11), min_size=1, max_size=16), cut=st.integers(0, 16))
def test_any_part_of_a_batch_in_any_order_gives_the_same_bytes(rows: list[int], cut: int) -> None:
    images, ids, changes = make_images(12, 3, 9, 8), torch.arange(7, 19), make(*EVERYTHING)
    whole = changes.apply(images, ids, EPOCH)
    few = torch.tensor(rows)
    parts = [changes.apply(images[part], ids[part], EPOCH) for part in (few[:cut], few[cut:])]
    assert torch.equal(torch.cat(parts), whole[few])


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("item", [*CHANGES, "color_jitter:0.4:0.4:0.4:0.2"])
def test_strides_and_pieces_do_not_matter(item: str, channels: int, monkeypatch) -> None:
    images, ids = make_images(20, channels), torch.arange(20)
    before, changes = images.clone(), Changes.parse([item], SEED, MEAN[:channels])
    assert changes is not None
    out = changes.apply(images, ids, EPOCH)
    assert torch.equal(images, before) and out.dtype == torch.uint8 and out.shape == images.shape
    last = images.contiguous(memory_format=torch.channels_last)
    flipped = images.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(changes.apply(last, ids, EPOCH), out)
    assert torch.equal(changes.apply(flipped, ids, EPOCH), out)
    monkeypatch.setattr(group_change, "_PIECE", 1)
    assert torch.equal(changes.apply(images, ids, EPOCH), out)


@pytest.mark.parametrize("item", CHANGES)
def test_bytes_depend_on_seed_epoch_and_sample(item: str) -> None:
    images, ids = make_images(2)[1:].expand(40, -1, -1, -1), torch.arange(40)
    state = torch.get_rng_state()
    out = make(item).apply(images, ids, EPOCH)
    assert torch.equal(make(item).apply(images, ids, EPOCH), out)
    assert torch.equal(torch.get_rng_state(), state)
    other_seed = Changes.parse([item], SEED + 1, MEAN)
    assert other_seed is not None
    others = [
        other_seed.apply(images, ids, EPOCH),
        make(item).apply(images, ids, EPOCH + 1),
        make(item).apply(images, ids + 1000, EPOCH),
    ]
    assert not any(torch.equal(other, out) for other in others)


def test_the_order_of_items_does_not_matter_and_the_last_of_a_name_counts() -> None:
    images, ids = make_images(10), torch.arange(10)
    out = make(*EVERYTHING).apply(images, ids, EPOCH)
    assert torch.equal(make(*reversed(EVERYTHING)).apply(images, ids, EPOCH), out)
    assert torch.equal(make("grayscale:1", *EVERYTHING).apply(images, ids, EPOCH), out)


def test_the_bytes_are_those_of_every_machine_and_version() -> None:
    pixels = random.bits(random.key("pixels"), torch.arange(64 * 3 * 19 * 22)) & 255
    out = make(*EVERYTHING).apply(pixels.view(64, 3, 19, 22).to(torch.uint8), torch.arange(64), EPOCH)
    assert hashlib.sha256(out.numpy().tobytes()).hexdigest()[:16] == "599bc09cf8789be5"


def test_an_empty_batch_stays_empty() -> None:
    assert make(*EVERYTHING).apply(make_images(3)[:0], torch.arange(0), EPOCH).shape == (0, 3, 21, 26)


def test_only_changes_are_parsed() -> None:
    assert Changes.parse(["flip", "crop:4", "mixup", "random_resized_crop"], SEED, MEAN) is None
    assert make("flip", "grayscale").numbers == {"grayscale": (0.1,)}
    assert make("color_jitter:0.3:.2").numbers == {"color_jitter": (0.3, 0.2, 0.4, 0.0)}


def test_every_operation_is_drawn_alike() -> None:
    draws = SampleDraw(SEED, EPOCH, torch.arange(28_000))
    counts = draws.integers("rand_augment-0-operation", 0, 13).bincount(minlength=14)
    assert (counts - 2000).abs().max() < 220  # five standard deviations
    first, second = (draws.integers(f"rand_augment-{turn}-operation", 0, 13) for turn in range(2))
    assert abs(float((first == second).double().mean()) - 1 / 14) < 0.01


@pytest.mark.parametrize(("p", "low", "high"), [(0, 0, 0), (0.1, 0.08, 0.12), (0.5, 0.47, 0.53), (1, 1, 1)])
def test_a_chance_is_met_as_often_as_it_says(p: float, low: float, high: float) -> None:
    images = torch.tensor([200, 100, 50], dtype=torch.uint8).view(1, 3, 1, 1).expand(8000, 3, 2, 2)
    out = make(f"grayscale:{p}").apply(images, torch.arange(8000), EPOCH)
    assert low <= float((out[:, 0] == out[:, 1]).all(-1).all(-1).double().mean()) <= high


def test_blur_has_its_probability() -> None:
    images = make_images(2, 3, 5, 5)[1:].expand(4000, -1, -1, -1)
    out = make("gaussian_blur:0.3:2:2").apply(images, torch.arange(4000), EPOCH)
    assert abs(float((out != images).flatten(1).any(1).double().mean()) - 0.3) < 0.03
    assert len(out.unique(dim=0)) == 2  # with one sigma there is one blur


def test_factors_and_sigmas_fill_their_ranges() -> None:
    images = torch.full((4000, 1, 1, 1), 100, dtype=torch.uint8)
    out = make("color_jitter:0.4:0:0").apply(images, torch.arange(4000), EPOCH)
    assert set(out.unique().tolist()) >= set(range(61, 139)) and out.min() > 59 and out.max() <= 140
    assert abs(float(out.double().mean()) - 99.5) < 2
    assert blur._kernels(0.1, 2.0)[0].tolist() == sorted(blur._kernels(0.1, 2.0)[0].tolist())


def test_maps_are_in_fixed_point() -> None:
    assert geometry.translate_map(3, -2) == [65536, 0, 32768 - 3 * 65536, 0, 65536, 32768 + 2 * 65536]


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [1, 3])
def test_a_gpu_gives_the_same_bytes(channels: int) -> None:
    images, ids = make_images(300, channels), torch.arange(300)
    changes = make(*EVERYTHING)
    torch.use_deterministic_algorithms(True)
    try:
        out = changes.apply(images.cuda(), ids, EPOCH)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(out.cpu(), changes.apply(images, ids, EPOCH))
