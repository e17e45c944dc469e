"""Map-style data sets of the user's: tensors, arrays and Pillow images as one store."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from lockstep.data.map_style import from_map_style
from lockstep.errors import DataError


class Counted(Dataset[tuple[Any, Any]]):
    """Images of one value each, in whatever form `form` gives them."""

    def __init__(self, form: Any, length: int = 30) -> None:
        self._form, self._length = form, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        return self._form(np.full((5, 4, 3), i, np.uint8)), i % 3


FORMS = {
    "array": lambda array: array,
    "grey array": lambda array: array[:, :, 0],
    "tensor": lambda array: torch.from_numpy(array).permute(2, 0, 1),
    "grey tensor": lambda array: torch.from_numpy(array)[:, :, 0],
    "pillow": Image.fromarray,
    "grey pillow": lambda array: Image.fromarray(array[:, :, 0]),
    "palette pillow": lambda array: Image.fromarray(array).convert("P"),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form(form: str) -> None:
    store = from_map_style((Counted(FORMS[form]), Counted(FORMS[form], 6)))
    images, labels = store.train.read(torch.tensor([7, 2]))
    channels = 1 if "grey" in form else 3
    assert store.shape == (channels, 5, 4) and images.shape == (2, channels, 5, 4)
    assert images.dtype == torch.uint8 and labels.tolist() == [1, 2]
    if "palette" not in form:
        assert images[0].unique().tolist() == [7]
    assert (len(store.train), len(store.test), store.classes) == (30, 6, ("0", "1", "2"))


def test_floats_are_used_as_they_are() -> None:
    data = TensorDataset(torch.randn(40, 2, 3, 3, dtype=torch.float64), torch.arange(40) % 4)
    store = from_map_style(data)
    assert store.mean == (0.0, 0.0) and store.std == (1.0, 1.0) and len(store.classes) == 4
    assert store.train.read(torch.tensor([0]))[0].dtype == torch.float32


def test_an_image_that_is_not_finite_is_named() -> None:
    images = torch.randn(40, 1, 3, 3)
    images[[7, 9], 0, 1, 2] = torch.tensor([float("nan"), float("inf")])
    data = [(image, 0) for image in images]
    store = from_map_style((data, data))
    assert len(store.train.read(torch.tensor([8, 6]))[0]) == 2
    for number in (7, 9):
        with pytest.raises(DataError, match=rf"train\[{number}\]: the image has values that are not finite"):
            store.train.read(torch.tensor([8, number, 6]))


def test_a_single_set_is_split_for_good() -> None:
    store = from_map_style(Counted(FORMS["array"], 200))
    assert len(store.train) + len(store.test) == 200 and 8 < len(store.test) < 35
    seen = [
        split.read(torch.arange(len(split)))[0][:, 0, 0, 0].tolist() for split in (store.train, store.test)
    ]
    assert sorted(seen[0] + seen[1]) == list(range(200))
    assert from_map_style(Counted(FORMS["array"], 200)).manifest == store.manifest
    assert from_map_style(Counted(FORMS["grey array"], 200)).manifest != store.manifest
    assert len(from_map_style(Counted(FORMS["array"], 2)).test) == 1
    assert from_map_style(store) is store


def test_targets_and_classes_are_used() -> None:
    data = Counted(FORMS["array"])
    data.classes = ["a", "b", "c", "d"]  # type: ignore[attr-defined]
    data.targets = [i % 3 for i in range(30)]  # type: ignore[attr-defined]
    assert from_map_style(data).classes == ("a", "b", "c", "d")
    data.classes = ["a"]  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=r"data\[1\]: label 1 is out of range: .* 0 to 0, the last"):
        from_map_style(data)


def test_reading_all_samples_for_their_labels_is_announced() -> None:
    told: list[str] = []
    data = Counted(FORMS["array"])
    from_map_style((data, data), told.append)
    assert told == [
        "reading 60 samples of Counted for their labels, once: a list of them, as its attribute `targets`, "
        "saves this"
    ]
    data.targets = [i % 3 for i in range(30)]  # type: ignore[attr-defined]
    from_map_style((data, data), told.append)
    assert len(told) == 1


def test_a_list_of_samples_is_a_data_set() -> None:
    samples = [(np.zeros((4, 4), np.uint8), 0), (np.ones((4, 4), np.uint8), np.int64(1))]
    assert len(from_map_style(samples).train) == 1


def test_the_first_image_that_differs_is_named() -> None:
    def form(array: np.ndarray[Any, Any]) -> Any:
        return array[:4] if array[0, 0, 0] in (7, 9) else array

    store = from_map_style((Counted(form), Counted(FORMS["array"])))
    with pytest.raises(DataError, match=r"train\[7\]: image is uint8 3x4x4, the first is uint8 3x5x4"):
        store.train.read(torch.arange(10))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, "int is no map-style data set"),
        ([], "list is empty"),
        ([(np.zeros((4, 4), np.uint8), 0)], "1 sample cannot be split"),
        ([(np.zeros((4, 4), np.uint8), [0, 1, 0])] * 2, "a label is an integer, not 3 values"),
        ([(np.zeros((4, 4), np.uint8), 0.5)] * 2, "a label is an integer, not float"),
        ([(np.zeros((4, 4), np.int32), 0)] * 2, "uint8 or float in 2 or 3 dims, not int32 1x4x4"),
        ([(np.zeros((3, 8, 8), np.uint8), 0)] * 2, r"has 8 channels: give torch\.from_numpy"),
        (["ab", "cd"], "not str"),
        ([1, 2], r"data\[\d\]: a sample must be .image, label.: "),
        ([(np.zeros((4, 4), np.uint8), -1)] * 2, r"data\[\d\]: label -1 is out of range: .* from 0;"),
        (
            [(np.zeros((4, 4), np.uint8), torch.eye(4)[1])] * 2,
            r"not 4 values: for a one-hot label, give its argmax",
        ),
        ((Stream(), Stream()), "train: Stream is no map-style data set"),
    ],
)
def test_bad_data_is_named(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_map_style(data)


def test_a_label_that_no_class_can_have_is_refused() -> None:
    data = [(torch.zeros(1, 4, 4), index) for index in (0, 1, 10**12)]
    with pytest.raises(DataError, match="label 1000000000000 would mean"):
        from_map_style((data, data))


def test_a_sample_that_is_another_when_read_again_is_refused() -> None:
    generator = np.random.default_rng(1)

    @lru_cache(maxsize=8)  # which answers when a sample is asked for again at once
    def flip(value: int) -> np.ndarray:
        array = np.full((5, 4, 3), value, np.uint8)
        array[:, 0] += 1
        return array[:, :: generator.choice([1, -1])]

    data = Counted(lambda array: flip(int(array[0, 0, 0])))
    with pytest.raises(
        DataError, match=r"test\[\d+\]: read twice, it gives two different samples: .* into data.augment"
    ):
        from_map_style((Counted(lambda array: array), data))


def test_images_may_share_a_buffer() -> None:
    buffer = torch.zeros(3, 5, 4, requires_grad=True)

    def fill(array: np.ndarray) -> torch.Tensor:
        return buffer.detach().fill_(float(array[0, 0, 0])).requires_grad_()

    images, _ = from_map_style((Counted(fill), Counted(fill))).train.read(torch.tensor([7, 2]))
    assert images[:, 0, 0, 0].tolist() == [7, 2]
