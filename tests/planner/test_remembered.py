"""What was measured on this machine is found again, and every run is predicted from it."""

from dataclasses import replace

import pytest
import torch
from small import small_run, train

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
from lockstep.spec.profile import LayerProfile, LayerTime, Profile

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


def test_a_run_on_a_probed_machine_is_predicted(cache, tmp_path):
    before, _ = train(small_run(), tmp_path / "before")
    assert "predicted" not in before.summary
    remember_cluster(here())
    after, _ = train(small_run(), tmp_path / "after")
    parts = after.summary["predicted"]
    assert set(parts) == {"step_s", "compute_s", "exchange_s", "hidden_s", "host_s", "data_s"}
    assert all(predicted >= 0 <= measured for predicted, measured in parts.values())
    assert parts["step_s"][0] > 0 < parts["step_s"][1] and parts["exchange_s"] == [0.0, 0.0]
    assert after.summary["weights_sha256"] == before.summary["weights_sha256"]


def test_other_runs_are_ranked_on_request(capsys):
    words = ["plan", "cifar10", "--cluster", "8xH100", "--workers", "8"]
    assert run([*words, "--vary", "batch,wire,grid", "--top", "100"]) == 0
    shown = capsys.readouterr().out
    assert "-o train.batch=" in shown and "-o train.wire=bf16" in shown and "-o train.bands=4" in shown
    assert run([*words, "--vary", "rate"]) == 2
    assert "unknown axis 'rate'" in capsys.readouterr().err
    assert run([*words[:-2], "--vary", "batch"]) == 2
    assert "needs --workers N" in capsys.readouterr().err
