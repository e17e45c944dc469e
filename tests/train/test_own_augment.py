"""An augmentation of the user's own, and repeated augmentation: keyed draws, one hash, what is refused."""

import sys

import forked
import numpy as np
import pytest
import torch
from photos import photo_run, take_photos
from small import small_run, train

from lockstep.data import open_data
from lockstep.data.augment import make_augment
from lockstep.data.changes.own_change import OwnChange
from lockstep.data.order import sample_ids
from lockstep.errors import DataError, SpecError

SCRIPT = """
import sys
import lockstep
from photos import photo_run

def darken(image, generator):
    return (image * generator.uniform(0.5, 1.0)).astype(image.dtype)

run = photo_run(sys.argv[1], "train.lanes=4", "data.augment=random_resized_crop,flip", "data.repeats=3")
launch = lockstep.Launch(workers=int(sys.argv[3]), runs_dir=sys.argv[2], name="run", device="cpu")
result = lockstep.train(run, launch=launch, on_event=lambda event: None, augment=darken)
if lockstep.is_main():
    print(result.summary["weights_sha256"])
"""


def darken(image, generator):
    return (image * generator.uniform(0.5, 1.0)).astype(image.dtype)


def shrink(image, generator):
    return image[1:]


def as_floats(image, generator):
    return image / 255


def forget(image, generator):
    image[:] = 0


def draw_anywhere(image, generator):
    return np.random.default_rng().integers(0, 255, image.shape, np.uint8)


def fail(image, generator):
    raise ValueError("no\nreason")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return take_photos(tmp_path_factory.mktemp("photos"), train=8, val=2)


@pytest.fixture(scope="module")
def images():
    return torch.randint(256, (6, 3, 5, 4), dtype=torch.uint8)


def test_draws_by_seed_epoch_and_number(images):
    numbers, change = torch.tensor([4, 0, 9, 5, 1, 7]), OwnChange(darken, 3)
    found = change.apply(images.clone(), numbers, 2)
    assert torch.equal(found[2:5], change.apply(images[2:5].clone(), numbers[2:5], 2))
    for other, epoch, given in (
        (OwnChange(darken, 4), 2, numbers),
        (change, 1, numbers),
        (change, 2, numbers + 1),
    ):
        assert not torch.equal(found, other.apply(images.clone(), given, epoch))


def test_bits_of_the_generator(images):
    """They are the same on every machine."""
    drawn = []

    def look(image, generator):
        drawn.append(generator.bit_generator.random_raw())
        return image

    assert torch.equal(OwnChange(look, 1).apply(images[:1], torch.tensor([5]), 2), images[:1])
    assert drawn == [16845205954316602959]


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (
            shrink,
            r"^augment=shrink gives uint8 \[15, 16, 3\] for an image, uint8 \[16, 16, 3\]: shape and type",
        ),
        (as_floats, r"^augment=as_floats gives float64 \[16, 16, 3\] for an image, uint8 "),
        (forget, r"^augment=forget gives a NoneType for an image, uint8 "),
        (draw_anywhere, r"^augment=draw_anywhere gives another image for the same generator"),
        (fail, r"^augment=fail fails on an image, uint8 \[16, 16, 3\]: no$"),
        (3, r"^augment=3: give a function of "),
    ],
)
def test_refused(function, text, photos, tmp_path):
    with pytest.raises(DataError, match=text) as caught:
        train(photo_run(photos), tmp_path, augment=function)
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


def test_floats_are_refused(tmp_path):
    data = [(torch.rand(1, 16, 16), number % 2) for number in range(40)]
    with pytest.raises(DataError, match=r"^augment=darken works on bytes, and"):
        train(small_run(), tmp_path, data=data, augment=darken)


def test_identity_has_it(photos, tmp_path):
    result, _ = train(photo_run(photos, "train.epochs=1"), tmp_path, augment=darken)
    plain, _ = train(photo_run(photos, "train.epochs=1"), tmp_path / "plain")
    assert result.summary["weights_sha256"] != plain.summary["weights_sha256"]
    assert "darken" in (result.directory / "identity.json").read_text()


def test_repeats_are_neighbours():
    positions = torch.arange(20)
    plain, found = sample_ids(1, 2, positions, 20), sample_ids(1, 2, positions, 20, repeats=3)
    assert torch.equal(found % 20, plain.repeat_interleave(3)[:20])
    assert torch.equal(found // 20, positions % 3)
    assert torch.equal(found[4:9], sample_ids(1, 2, positions[4:9], 20, repeats=3))


def test_repeats_are_drawn_apart(photos):
    run = photo_run(photos, "data.repeats=2", "data.augment=random_resized_crop,color_jitter")
    store = open_data(run)
    augment = make_augment(run, store.shape, store.mean, store.std, darken)
    numbers = sample_ids(0, 0, torch.arange(4), len(store.train), repeats=2)
    images, labels = augment.read(store.train, numbers, 0)
    assert labels[0] == labels[1] and not torch.equal(images[0], images[1])


@pytest.mark.parametrize("repeats", [0, 65])
def test_repeats_in_range(repeats):
    with pytest.raises(SpecError, match=f"^data.repeats={repeats} must be from 1"):
        small_run(f"data.repeats={repeats}")


def test_repeats_without_augmentation(tmp_path):
    with pytest.raises(DataError, match=r"^data.repeats=2 without data.augment"):
        train(small_run("data.repeats=2"), tmp_path)


@pytest.mark.gloo
def test_one_hash(photos, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    found = set()
    for workers in (1, 2, 3, 4):
        words = [str(tmp_path / "script.py"), str(photos), str(tmp_path / str(workers)), str(workers)]
        done = forked.call([sys.executable, *words], launches=True)
        assert done.returncode == 0, done.stderr
        found.add(done.stdout.strip())
    assert len(found) == 1 and found != {""}


def test_resumed_in_an_epoch(photos, tmp_path):
    keys = (
        "data.augment=random_resized_crop",
        "data.repeats=3",
        "checkpoint.every_steps=1",
        "checkpoint.keep=99",
    )
    result, _ = train(photo_run(photos, *keys), tmp_path, augment=darken)
    (result.directory / "summary.json").unlink()
    for path in sorted((result.directory / "checkpoints").glob("step-*"))[2:]:
        path.unlink()
    again, _ = train(
        photo_run(photos, *keys),
        tmp_path,
        augment=darken,
        launch={"name": None, "resume": str(result.directory)},
    )
    assert again.summary["weights_sha256"] == result.summary["weights_sha256"]
