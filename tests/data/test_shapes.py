"""Shapes: pure functions of (seed, index), every size, and a task that needs more than single pixels."""

from __future__ import annotations

import dataclasses
import hashlib

import pytest
import torch
import torch.nn.functional as F

from lockstep.data import shapes
from lockstep.data.shapes import FIGURES, DrawnSplit, ShapesOptions, open_shapes
from lockstep.data.store import MemorySplit
from lockstep.errors import DataError

SMALL = ShapesOptions(num_train=300, num_test=100)


def test_pixels_are_those_of_this_version() -> None:
    images, labels = DrawnSplit(ShapesOptions(), "train", 64).read(torch.arange(64))
    colour, _ = DrawnSplit(ShapesOptions(size=33, channels=3, classes=20), "test", 64).read(torch.arange(64))
    digest = hashlib.sha256(images.numpy().tobytes() + labels.numpy().tobytes() + colour.numpy().tobytes())
    assert (shapes.VERSION, digest.hexdigest()) == (
        1,
        "2f51a7ab6b8650e960b6fcf16fbb53de89b27c95083346d25c23b8e758f2fd82",
    ), "the pixels changed: raise shapes.VERSION"


def test_an_image_depends_on_its_index_alone() -> None:
    store = open_shapes(SMALL)
    ids = torch.tensor([299, 0, 17, 17, 142])
    images, labels = store.train.read(ids)
    again = DrawnSplit(dataclasses.replace(SMALL, num_train=10**9), "train", 10**9).read(ids)
    assert torch.equal(images, again[0]) and torch.equal(labels, again[1])


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = DrawnSplit(SMALL, "train", 40).read(torch.arange(40))[0]
    monkeypatch.setattr(shapes, "_CHUNK_PIXELS", 1)
    assert torch.equal(whole, DrawnSplit(SMALL, "train", 40).read(torch.arange(40))[0])


def test_splits_and_seeds_differ() -> None:
    store, other = open_shapes(SMALL), open_shapes(dataclasses.replace(SMALL, seed=1))
    ids = torch.arange(100)
    first = store.train.read(ids)[0]
    assert not torch.equal(first, store.test.read(ids)[0])
    assert not torch.equal(first, other.train.read(ids)[0])


def test_validation_images_are_others_and_change_nothing_else() -> None:
    store, held = open_shapes(SMALL), open_shapes(dataclasses.replace(SMALL, num_val=50))
    assert store.val is None and "num_val" not in store.manifest and held.manifest["num_val"] == 50
    ids = torch.arange(50)
    assert held.chosen_by == ("val", held.val) and held.val is not None
    assert torch.equal(store.train.read(ids)[0], held.train.read(ids)[0])
    assert torch.equal(store.test.read(ids)[0], held.test.read(ids)[0])
    assert not any(torch.equal(held.val.read(ids)[0], s.read(ids)[0]) for s in (held.train, held.test))


def test_classes_are_balanced_and_named() -> None:
    store = open_shapes(dataclasses.replace(SMALL, num_train=4000, size=8))
    counts = store.train.read(torch.arange(4000))[1].bincount()
    assert len(counts) == 10 and counts.min() > 300
    assert store.classes == tuple(FIGURES)[:10]


@pytest.mark.parametrize(("size", "channels", "classes"), [(8, 1, 2), (32, 3, 20), (41, 2, 5)])
def test_every_size(size: int, channels: int, classes: int) -> None:
    store = open_shapes(ShapesOptions(size, channels, classes, num_train=60, num_test=20))
    images, labels = store.train.read(torch.arange(60))
    assert images.shape == (60, channels, size, size) and images.dtype == torch.uint8
    assert store.shape == (channels, size, size) and len(store.mean) == len(store.std) == channels
    assert labels.dtype == torch.int64 and int(labels.max()) < classes


def test_a_big_set_is_drawn_when_read() -> None:
    store = open_shapes(ShapesOptions(size=224, channels=3, num_train=1_281_167, num_test=50_000))
    assert isinstance(store.train, DrawnSplit) and len(store.train) == 1_281_167
    assert store.train.read(torch.tensor([1_281_166]))[0].shape == (1, 3, 224, 224)


def test_figures_cover_what_they_should() -> None:
    axis = torch.linspace(-1, 1, 41)
    u, v = axis[None, :].expand(41, 41), axis[:, None].expand(41, 41)
    shares = {name: float((figure(u, v) < 0).float().mean()) for name, figure in FIGURES.items()}
    assert all(0.05 < share < 0.75 for share in shares.values()), shares


def test_statistics_normalize() -> None:
    store = open_shapes(dataclasses.replace(SMALL, num_train=2000))
    assert isinstance(store.train, MemorySplit)
    pixels = store.train.images.float() / 255
    assert abs(float(pixels.mean()) - store.mean[0]) < 0.02 and abs(float(pixels.std()) - store.std[0]) < 0.02


def test_single_pixels_do_not_tell_the_class() -> None:
    store = open_shapes(ShapesOptions(num_train=3000, num_test=500))
    torch.manual_seed(0)
    weight = torch.zeros(784, 10, requires_grad=True)
    images, labels = store.train.read(torch.arange(3000))
    inputs = (images.flatten(1).float() / 255 - 0.5) / 0.25
    for _ in range(60):
        (gradient,) = torch.autograd.grad(F.cross_entropy(inputs @ weight, labels), weight)
        weight = (weight - 0.05 * gradient).detach().requires_grad_()
    images, labels = store.test.read(torch.arange(500))
    guesses = ((images.flatten(1).float() / 255 - 0.5) / 0.25 @ weight).argmax(1)
    assert (guesses == labels).float().mean() < 0.7


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("classes", 50, "20 figures; choose 2 to 20"),
        ("size", 7, "at least 8"),
        ("size", 10**9, "at most 16384"),
        ("num_test", 0, "at least 1"),
    ],
)
def test_bad_options_are_named(field: str, value: int, rule: str) -> None:
    with pytest.raises(DataError, match=f"data.{field}={value}: .*{rule}"):
        ShapesOptions(**{field: value})
