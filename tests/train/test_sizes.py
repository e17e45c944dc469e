"""Training images whose size depends on the epoch: what is read, one hash, resumed, what is refused."""

import json
import sys
from pathlib import Path

import forked
import pytest
import torch
from photos import photo_run, take_photos
from small import train
from torch import nn

from lockstep.data.images.view_options import ViewOptions
from lockstep.data.pack.find_source import pack_data
from lockstep.errors import DataError, ModelError, SpecError
from lockstep.spec.plan import Plan
from lockstep.spec.plan_check import check_plans
from lockstep.train.setup import Given, set_up

KEYS = (
    "train.epochs=3",
    "train.lanes=4",
    "data.sizes=8@0,12@1,16@2",
    "data.augment=random_resized_crop,crop,flip,cutmix",
    "checkpoint.every_steps=1",
    "checkpoint.keep=99",
)
SCRIPT = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import lockstep
from photos import photo_run
from test_sizes import KEYS, make_net

launch = lockstep.Launch(workers=int(sys.argv[3]), runs_dir=sys.argv[2], name="run", device="cpu")
result = lockstep.train(photo_run(sys.argv[1], *KEYS), make_net(), launch=launch, on_event=lambda event: None)
if lockstep.is_main():
    print(result.summary["weights_sha256"])
"""


def make_net():
    torch.manual_seed(0)
    parts = (
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    return nn.Sequential(*parts, nn.Linear(8, 3))


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return take_photos(tmp_path_factory.mktemp("photos"), train=8, val=2)


@pytest.fixture(scope="module")
def trained(photos, tmp_path_factory):
    return train(photo_run(photos, *KEYS), tmp_path_factory.mktemp("runs"), model=make_net())[0]


@pytest.mark.parametrize("form", [None, {}, {"raw": True, "size": 20}], ids=["folder", "files", "raw"])
def test_size_of_each_epoch(form, photos, tmp_path):
    keys = KEYS
    if form is not None:
        pack_data(photos, tmp_path / "packed", **form)
        keys = (*KEYS, "data.name=pack", f"data.dir={tmp_path / 'packed'}")
    setup = set_up(photo_run(photos, *keys), torch.device("cpu"), Given(make_net()))
    stages = setup.stages()
    for epoch, size in enumerate((8, 12, 16, 16)):
        split, augment = stages(epoch)
        assert augment.read(split, torch.arange(2), epoch)[0].shape == (2, 3, size, size)
        assert split.read(torch.arange(2))[0].shape == (2, 3, size, size)
        assert augment.crop_padding == size // 8 and augment.mix.shape == (size, size)
    assert stages(3)[0] is setup.store.train and setup.store.eval_shape == (3, 16, 16)
    assert len(setup.identity["numerics.lane_by_size"]) == 2
    assert setup.identity["data.sizes"] == setup.identity["manifest.sizes"] == "8@0,12@1,16@2"


def test_pack_trains_alike(photos, trained, tmp_path):
    pack_data(photos, tmp_path / "packed")
    run = photo_run(photos, "data.name=pack", f"data.dir={tmp_path / 'packed'}", *KEYS)
    result, _ = train(run, tmp_path, model=make_net())
    assert result.summary["weights_sha256"] == trained.summary["weights_sha256"]


def test_sizes_change_the_weights(photos, trained, tmp_path):
    result, _ = train(photo_run(photos, *KEYS, "data.sizes=16@0"), tmp_path, model=make_net())
    assert result.summary["weights_sha256"] != trained.summary["weights_sha256"]


@pytest.mark.parametrize("kept", [2, 5, 8])
def test_resumed(kept, photos, trained, tmp_path):
    """In the middle of the first epoch, of the second, and of the last."""
    result, _ = train(photo_run(photos, *KEYS), tmp_path, model=make_net())
    (result.directory / "summary.json").unlink()
    for path in sorted((result.directory / "checkpoints").glob("step-*"))[kept:]:
        path.unlink()
    again, _ = train(
        photo_run(photos, *KEYS),
        tmp_path,
        model=make_net(),
        launch={"name": None, "resume": str(result.directory)},
    )
    assert again.summary["weights_sha256"] == trained.summary["weights_sha256"]


@pytest.mark.gloo
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_one_hash(workers, photos, trained, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [str(tmp_path / "script.py"), str(photos), str(tmp_path), str(workers)]
    done = forked.call([sys.executable, *words], launches=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == trained.summary["weights_sha256"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["loss"] == trained.summary["loss"]


@pytest.mark.parametrize("text", ["8", "8@1", "8@0,9@0", "8@0,", "0@0", "8@0;9@1", "8@0,9@2,10@1"])
def test_text(text):
    with pytest.raises(DataError, match=r"^data.sizes=.* must be sizes with their first epochs, .*192@12$"):
        ViewOptions(sizes=text)


@pytest.mark.parametrize(
    ("keys", "error", "text"),
    [
        (("data.sizes=8@0,16@3",), DataError, r"^data.sizes=8@0,16@3: 16@3 begins after the last epoch, as"),
        (("train.bands=2",), ModelError, r"^data.sizes=.*: not with train.bands or train.slices"),
        (
            ("kernels.set=fused", "data.augment=flip"),
            ModelError,
            r"^kernels.set=fused: its steps have images of one size, unlike ",
        ),
        (("data.sizes=99999@0",), DataError, r"^data.sizes=99999: an image has at most"),
    ],
)
def test_refused(keys, error, text, photos, tmp_path):
    with pytest.raises(error, match=text) as caught:
        train(photo_run(photos, *KEYS, *keys), tmp_path, model=make_net())
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


def test_plans_that_cut_the_model(photos):
    with pytest.raises(SpecError, match=r"^--plan pipeline=2: not with data.sizes, as the parts of a model "):
        check_plans([Plan(pipeline=2)], photo_run(photos, *KEYS), 2)


def test_model_of_one_size(photos, tmp_path):
    with pytest.raises(ModelError, match=r"^data.sizes=.*, built for 16x16, does not train on 8x8: "):
        train(photo_run(photos, *KEYS), tmp_path)


def test_raw_pixels_are_not_enlarged(photos, tmp_path):
    pack_data(photos, tmp_path / "packed", raw=True, size=14)
    run = photo_run(photos, *KEYS, "data.name=pack", f"data.dir={tmp_path / 'packed'}")
    with pytest.raises(DataError, match=r"^data.sizes=8@0,12@1,16@2: .* holds raw pixels, 3 × 14 × 14"):
        train(run, tmp_path / "runs", model=make_net())
