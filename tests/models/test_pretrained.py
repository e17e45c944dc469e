"""model.weights=pretrained and data.normalize: by a stand-in for timm, and by timm itself where it is."""

import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from small import small_run, summary, train
from torch import nn

from lockstep.data import open_data
from lockstep.errors import DataError, ModelError, Paused, SpecError
from lockstep.models.tensors import tensors_sha256
from lockstep.models.weights_form import WeightsForm, file_form
from lockstep.runs.export import export_model
from lockstep.runs.trained_run import open_trained

KEYS = ("model.name=timm:tiny_net", "data.num_train=64", "data.num_test=16", "train.epochs=1")


class TinyNet(nn.Module):
    """A norm, a mean over pixels and a head, by names of its own."""

    def __init__(self, channels, classes):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4, classes)

    def forward(self, x):
        return self.head(self.stem(x).mean((2, 3)))


def published(channels):
    torch.manual_seed(7)
    return TinyNet(channels, 1000)


@pytest.fixture
def timm(monkeypatch):
    """It has weights for one model, trained at 16 pixels, and notes what it is asked for."""
    asked = []

    def create_model(name, pretrained=False, in_chans=3, num_classes=1000, **options):
        asked.append((name, pretrained))
        if pretrained and options.get("offline"):
            raise OSError("cannot reach\n the hub")
        return published(in_chans) if pretrained else TinyNet(in_chans, num_classes)

    config = SimpleNamespace(mean=(0.5,), std=(0.5,), input_size=(1, 16, 16))
    found = SimpleNamespace(
        create_model=create_model,
        is_model=["tiny_net"].__contains__,
        list_models=lambda: ["tiny_net"],
        get_pretrained_cfg=lambda name: config,
    )
    monkeypatch.setitem(sys.modules, "timm", found)
    return asked


def notices(events):
    return [event.text for event in events if hasattr(event, "text")]


def told(result, events):
    return " ".join([*notices(events), *(str(e) for e in events)])


def test_a_run_begins_with_published_weights_and_a_new_head(timm, tmp_path):
    run = small_run(*KEYS, "model.weights=pretrained", "model.freeze=stem")
    result, events = train(run, tmp_path)
    theirs, ours = published(1).state_dict(), open_trained(tmp_path, "run", device="cpu").model.state_dict()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs if name.startswith("stem"))
    assert ours["head.weight"].shape == (10, 4)
    identity = open_trained(tmp_path, "run", device="cpu").identity
    assert identity["source.weights_sha256"] == tensors_sha256(theirs)
    assert (
        "model.weights" not in identity
        and 'weights = "pretrained"' in (result.directory / "run.toml").read_text()
    )
    said = told(result, events)
    assert "published weights of timm:tiny_net" in said and "head.weight, head.bias" in said
    assert "set data.normalize=0.5/0.5" in said and "trained at" not in said


def test_a_resumed_run_does_not_ask_for_them_again(timm, tmp_path):
    run = small_run(*KEYS, "model.weights=pretrained", "train.epochs=2")
    whole, _ = train(run, tmp_path / "whole")
    with pytest.raises(Paused):
        train(run, tmp_path, launch={"stop_after_epochs": 1})
    timm.clear()
    resumed, _ = train(run, tmp_path, launch={"resume": "auto"})
    assert all(not pretrained for _, pretrained in timm)
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]


def test_what_cannot_be_had_is_said(timm, tmp_path):
    for keys, says in (
        (("model.offline=true",), r"could not get the weights of tiny_net \(cannot reach the hub\)"),
        (
            ("model.name=lenet5",),
            "there are published weights for resnet18, resnet34, resnet50 and timm:NAME",
        ),
    ):
        with pytest.raises(ModelError, match=says):
            train(small_run(*KEYS, "model.weights=pretrained", *keys), tmp_path)
    assert not any(tmp_path.iterdir())


def test_images_are_normalized_as_the_run_says_in_training_and_later(tmp_path):
    keys = (*KEYS[1:], "data.normalize=0.25/0.5")
    result, _ = train(small_run(*keys), tmp_path)
    plain, _ = train(small_run(*KEYS[1:]), tmp_path)
    assert result.summary["weights_sha256"] != plain.summary["weights_sha256"]
    trained = open_trained(tmp_path, str(result.directory), device="cpu")
    assert (trained.augment.mean, trained.augment.std) == ((0.25,), (0.5,))
    assert open_data(small_run("data.channels=2", "data.normalize=0.5/0.1")).mean == (0.5, 0.5)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("0.5", "must be text, not float"),
        ("0.5/0", "must be MEAN/STD"),
        ("a/b", "must be MEAN/STD"),
        ("nan/1", "must be MEAN/STD"),
        ("0.5,0.5/0.5", "must be MEAN/STD"),
        ("0,0,0/1,1,1", "has 3 channels, and the images have 1"),
    ],
)
def test_a_wrong_normalization_is_refused(text, error, tmp_path):
    with pytest.raises(SpecError, match=error):
        train(small_run(f"data.normalize={text}"), tmp_path)


def test_a_data_set_of_ones_own_normalizes_itself(tmp_path):
    data = [(torch.zeros(1, 16, 16, dtype=torch.uint8), number % 2) for number in range(80)]
    with pytest.raises(DataError, match="is for data sets by name"):
        train(small_run("data.normalize=0.5/0.5"), tmp_path, data=data)


def test_an_export_and_a_checkpoint_tell_their_form(tmp_path):
    result, _ = train(small_run(*KEYS[1:], "data.normalize=0.25/0.5"), tmp_path)
    form = WeightsForm((0.25,), (0.5,), 16, open_data(small_run()).classes)
    (saved,) = (result.directory / "checkpoints").glob("*.safetensors")
    assert file_form(saved) == form
    trained = open_trained(tmp_path, "run", device="cpu", loads=False)
    export_model(trained, tmp_path / "run.safetensors", "safetensors")
    assert file_form(tmp_path / "run.safetensors") == form
    save_file({"x": torch.zeros(1)}, tmp_path / "plain.safetensors")
    assert file_form(tmp_path / "plain.safetensors") is None
    tuned, events = train(small_run(*KEYS[1:], f"model.weights={saved}"), tmp_path / "tuned")
    said = told(tuned, events)
    assert "set data.normalize=0.25/0.5" in said and "trained at" not in said
    told_size, told_head = form.explain(WeightsForm((0.25,), (0.5,), 20, tuple("abcdefghij")))
    assert "trained at 16 pixels, and these images have 20" in told_size
    assert told_head.startswith("the head is kept, though it was trained on as many classes of other names")
    assert "the head is kept" not in said
    assert summary(tuned.directory)["weights_sha256"]


def test_timm_itself(tmp_path, monkeypatch):
    """From its own cache, laid out as a download leaves it; nothing is fetched."""
    timm = pytest.importorskip("timm")
    hub = timm.get_pretrained_cfg("resnet10t").hf_hub_id
    snapshots = tmp_path / "hub" / f"models--{hub.replace('/', '--')}"
    (snapshots / "refs").mkdir(parents=True)
    (snapshots / "refs" / "main").write_text("0" * 40)
    (snapshots / "snapshots" / ("0" * 40)).mkdir(parents=True)
    theirs = timm.create_model("resnet10t").state_dict()
    save_file(theirs, snapshots / "snapshots" / ("0" * 40) / "model.safetensors")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    keys = ("model.name=timm:resnet10t", "data.channels=3", "data.size=32", "train.batch=8", "train.lanes=2")
    run = small_run(
        *KEYS[1:], *keys, "data.num_train=8", "model.weights=pretrained", "model.freeze=conv1,bn1"
    )
    result, events = train(run, tmp_path / "runs")
    ours = open_trained(tmp_path / "runs", "run", device="cpu").model.state_dict()
    assert torch.equal(theirs["conv1.0.weight"], ours["conv1.0.weight"]) and ours["fc.weight"].shape[0] == 10
    assert "set data.normalize=" in told(result, events)
