"""Every item of data.augment is checked: its name, and its numbers against their ranges."""

import pytest

from lockstep.errors import SpecError
from lockstep.spec.sample.augmentation import AUGMENTATIONS, MOVES, check_item, read_numbers


@pytest.mark.parametrize("name", [*MOVES, *AUGMENTATIONS])
def test_a_name_alone_has_defaults_that_fit(name: str) -> None:
    check_item(name)
    if name in AUGMENTATIONS:
        defaults = read_numbers(name)
        check_item(":".join([name, *(f"{number:g}" for number in defaults)]))
        for number, value in zip(AUGMENTATIONS[name], defaults, strict=True):
            assert number.low <= value == number.default <= number.high


def test_numbers_that_are_left_out_have_their_defaults() -> None:
    assert read_numbers("color_jitter") == (0.4, 0.4, 0.4, 0)
    assert read_numbers("color_jitter:0.8:.2") == (0.8, 0.2, 0.4, 0)
    assert read_numbers("rand_augment:3") == (3, 9)
    assert read_numbers("gaussian_blur:1:0.5:1.5") == (1, 0.5, 1.5)


@pytest.mark.parametrize(
    "item",
    [
        "color_jitter:x",
        "color_jitter:",
        "color_jitter::0.4",
        "color_jitter:-0.4",
        "color_jitter:nan",
        "color_jitter:1e9",
        "color_jitter:11",
        "color_jitter:0.4:0.4:0.4:0.6",
        "color_jitter:0:0:0:0:0",
        "grayscale:1.1",
        "gaussian_blur:0.5:1.0:0.5",
        "gaussian_blur:0.5:3",
        "gaussian_blur:0.5:0",
        "rand_augment:0",
        "rand_augment:2.5",
        "rand_augment:2:31",
        "trivial_augment:1",
        "random_erasing:２",
        "random_resized_crop:0",
        "random_resized_crop:0.5:0.2",
        "mixup:0",
        "cutmix:1:1",
    ],
)
def test_numbers_that_do_not_fit_are_refused_in_one_line(item: str) -> None:
    name = item.partition(":")[0]
    with pytest.raises(SpecError) as error:
        check_item(item)
    text = str(error.value)
    assert text.startswith(f"data.augment: '{item}' must be ") and "\n" not in text and len(text) < 200
    assert all(number.name in text for number in AUGMENTATIONS[name])


def test_the_rule_has_an_example_and_ranges() -> None:
    with pytest.raises(SpecError) as error:
        check_item("rand_augment:2:31")
    assert str(error.value) == (
        "data.augment: 'rand_augment:2:31' must be like rand_augment:2:9: "
        "num_ops a whole number from 1 to 16, magnitude a whole number from 0 to 30"
    )
    with pytest.raises(SpecError, match="must be trivial_augment alone, without numbers"):
        check_item("trivial_augment:1")


def test_an_unknown_name_shows_the_nearest() -> None:
    with pytest.raises(SpecError, match="unknown augmentation 'colour_jitter': did you mean 'color_jitter'"):
        check_item("colour_jitter:0.4")
