"""What was measured on this machine is found again, and every run is predicted from it."""

import json
from dataclasses import replace

import pytest
import torch
from small import small_run, train
from torch import nn

from lockstep.cli.main import run
from lockstep.errors import SpecError
from lockstep.measure.probe_device import name_device
from lockstep.planner.preset import find_cluster
from lockstep.planner.remembered import (
    recall_cluster,
    recall_profile,
    remember_cluster,
    remember_profile,
)
from lockstep.spec.profile import LayerProfile, LayerTime, Profile, read_profile, write_profile
from lockstep.train.foresight import own_prediction

SHAPE = (3, 32, 32)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("LOCKSTEP_CACHE", str(folder))
    return folder


def here():
    cluster = find_cluster("cpu-10g")
    return replace(cluster, worker=replace(cluster.worker, device=name_device(torch.device("cpu"))))


def test_a_machine_is_found_by_its_device(cache):
    with pytest.raises(SpecError, match="run `lockstep probe`"):
        find_cluster("here")
    remember_cluster(here())
    assert recall_cluster(here().worker.device) == here() == find_cluster("here")
    assert recall_cluster("another") is None
    (file,) = (cache / "clusters").iterdir()
    file.write_text("of another version")
    assert recall_cluster(here().worker.device) is None


def test_a_cache_that_cannot_be_written_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "file" / "under"))
    (tmp_path / "file").write_text("")
    remember_cluster(here())
    assert recall_cluster(here().worker.device) is None


def test_a_profile_is_of_one_run(cache):
    own, times = small_run(), (LayerTime(8, 0.1, 0.2),)
    layer = LayerProfile("conv", "convolution", 1e6, 10, 3, 4, times=times)
    profile = Profile(own.model.name, SHAPE, 10, "fp32", "stock", (layer,), device="cpu")
    remember_profile(own, profile)
    assert recall_profile(own, SHAPE, "cpu") == profile
    longer = replace(own, train=replace(own.train, epochs=own.train.epochs + 1))
    assert recall_profile(longer, SHAPE, "cpu") == profile
    other = replace(own, train=replace(own.train, lanes=2 * own.train.lanes))
    assert recall_profile(other, SHAPE, "cpu") is None is recall_profile(own, SHAPE, "gpu")
    local = replace(own, train=replace(own.train, local_steps=4))  # whose lanes have stock kernels
    assert recall_profile(local, SHAPE, "cpu") is None
    remember_profile(replace(own, kernels=replace(own.kernels, set="stock")), profile)
    assert recall_profile(local, SHAPE, "cpu") == profile


def test_a_run_on_a_probed_machine_is_predicted(cache, tmp_path):
    before, _ = train(small_run(), tmp_path / "before")
    assert "predicted" not in before.summary
    remember_cluster(here())
    after, _ = train(small_run(), tmp_path / "after")
    parts = after.summary["predicted"]
    assert after.summary["predicted_from"] == "the probe, layers counted: rough"
    assert set(parts) == {"step_s", "compute_s", "exchange_s", "hidden_s", "host_s", "data_s"}
    assert all(predicted >= 0 <= measured for predicted, measured in parts.values())
    assert parts["step_s"][0] > 0 < parts["step_s"][1] and parts["exchange_s"] == [0.0, 0.0]
    assert after.summary["weights_sha256"] == before.summary["weights_sha256"]


def test_a_spoilt_cache_does_not_end_a_run(cache, tmp_path, monkeypatch):
    remember_cluster(here())
    monkeypatch.setattr(own_prediction, "recall_profile", lambda *_: 1 / 0)
    told, _ = train(small_run(), tmp_path)
    assert "predicted" not in told.summary and told.summary["weights_sha256"]


@pytest.mark.parametrize(
    "change",
    [{"precision": "fp7"}, {"layers": []}, {"lanes": [{"lanes": 1, "images": 0, "seconds": 1.0}]},
     {"update_s": "1"}, {"update_s": float("nan")}, {"update_s": -1.0}],
)  # fmt: skip
def test_a_nonsense_profile_is_refused(tmp_path, change):
    layer = LayerProfile("conv", "convolution", 1e6, 10, 3, 4, times=(LayerTime(8, 0.1, 0.2),))
    path = tmp_path / "profile.json"
    write_profile(path, Profile("lenet5", SHAPE, 10, "fp32", "stock", (layer,), device="cpu"))
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(SpecError, match=r"profile\.json: not a profile: "):
        read_profile(path)


def test_a_module_of_ones_own_is_predicted_as_itself(cache, tmp_path):
    remember_cluster(here())
    wide = nn.Sequential(
        nn.Conv2d(1, 2048, 5), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 10)
    )
    named, _ = train(small_run(), tmp_path / "named")
    own, _ = train(small_run(), tmp_path / "own", model=wide)
    assert own.summary["predicted"]["step_s"][0] > 5 * named.summary["predicted"]["step_s"][0]


def test_other_runs_are_ranked_on_request(capsys):
    words = ["plan", "cifar10", "--cluster", "8xH100", "--workers", "8"]
    assert run([*words, "--vary", "batch,wire,grid", "--top", "100"]) == 0
    shown = capsys.readouterr().out
    assert "-o train.batch=" in shown and "-o train.wire=bf16" in shown and "-o train.bands=4" not in shown
    assert run([*words, "-o", "kernels.set=stock", "--vary", "grid", "--top", "100"]) == 0
    assert "-o train.bands=4" in capsys.readouterr().out
    assert run([*words, "--vary", "rate"]) == 2
    assert "unknown axis 'rate'" in capsys.readouterr().err
    assert run([*words[:-2], "--vary", "batch"]) == 2
    assert "needs --workers N" in capsys.readouterr().err


def test_runs_without_a_step_are_left_out(capsys):
    words = ["plan", "shapes", "--cluster", "8xH100", "--workers", "2", "-o", "data.num_train=600"]
    assert run([*words, "--vary", "batch", "--top", "100"]) == 0
    shown = capsys.readouterr().out
    assert "-o train.batch=512" in shown and "-o train.batch=1024" not in shown
    for more, says in (
        (["-o", "train.batch=1024"], "train.batch=1024 is more than the 600 images"),
        (["--images", "-4"], "--images -4 must be at least 0"),
        (["--top", "0"], "--top 0 must be at least 1"),
    ):
        assert run([*words, *more]) == 2
        assert says in capsys.readouterr().err
