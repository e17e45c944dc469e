"""`lockstep profile` and `lockstep plan`: a real profile here, plans from it, and one of them trained."""

import json
import subprocess
import sys

import pytest

from lockstep.cli.main import run
from lockstep.planner.preset import find_cluster
from lockstep.spec.plan import read_plan
from lockstep.spec.profile import read_profile

SMALL = ["shapes", "-o", "train.batch=32", "-o", "train.lanes=4", "-o", "data.num_train=256"]
SMALL += ["-o", "data.num_test=64", "-o", "train.epochs=1"]
PRESET = ["--cluster", "8xH100"]


def said(capsys, *words):
    assert run([*words]) == 0
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    path = tmp_path_factory.mktemp("profile") / "p.json"
    trace, picture = path.with_name("trace.json"), path.with_name("p.png")
    words = ["--device", "cpu", "--batch", "2,8", "--steps", "3", "--parts", "channel=2"]
    words += ["--output", str(path), "--trace", str(trace), "--picture", str(picture)]
    command = [sys.executable, "-W", "error", "-m", "lockstep", "profile", *SMALL, *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert "a step of 4 lanes of 8 images" in done.stdout and "convolution" in done.stdout
    head = done.stdout.splitlines()[0]
    assert all(column in head for column in ("MFLOP", "moved MB", "memory MB", "backward ms", "80 % from"))
    assert "img/s with loading" in done.stdout
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"X"} and picture.read_bytes()[:4] == b"\x89PNG"
    return path


def test_a_profile_has_layers_and_steps(profile):
    found = read_profile(profile)
    assert {row.lanes for row in found.lanes} == {1, 2, 4} and all(row.seconds > 0 for row in found.lanes)
    assert {time.images for layer in found.layers for time in layer.times} == {2, 8}
    assert found.update_s > 0 and found.parameters > 1000 and found.device
    assert [row.images for row in found.loading] == [2, 8] and all(row.seconds > 0 for row in found.loading)


def test_plans_without_data_or_processes(capsys):
    words = ["plan", "imagenet", *PRESET, "--workers", "16", "-o", "train.lanes=16", "-o", "train.batch=1024"]
    out = said(capsys, *words)
    assert out.splitlines()[1].startswith("data=16") and "102 MB of gradients" in out
    assert out == said(capsys, *words)
    table = json.loads(said(capsys, *words, "--json"))
    best = table["plans"][0]
    assert table["best"] == {"plan": best["plan"], "workers": 16, "change": ""}
    assert (table["cluster"], table["model"], table["batch"]) == ("8xH100", "resnet50", 1024)
    assert table["workers_a_node"] == 8 and table["network"]["gb_s"] > 0 and table["link"]["gb_s"] > 0
    parts = ("compute_s", "inside_s", "bubble_s", "exposed_s", "gather_s", "update_s", "host_s", "data_s")
    assert best["total_s"] == pytest.approx(sum(best[part] for part in parts))
    assert best["range_s"][0] < best["total_s"] < best["range_s"][1]
    assert 0.5 < best["efficiency"] <= 1 and best["hours"] > 0


def test_computing_again_is_told_of_and_is_for_whole_models(capsys):
    words = ["plan", "cifar10", *PRESET, "--workers", "4", "-o", "train.recompute=true", "--top", "99"]
    out = said(capsys, *words)
    assert "memory and seconds are those without train.recompute=true" in out
    plans = {line.split()[0] for line in out.split("\n\n")[0].splitlines()[1:]}
    assert plans == {"data=4", "data=4,shard=optimizer", "data=4,shard=gradients"}


def test_layers_by_channel_are_advised_where_the_run_takes_them(capsys):
    words = ["plan", "imagenet", "--cluster", "cpu-1g", "--workers", "8", "-o", "model.name=alexnet"]
    words += ["-o", "train.lanes=8", "-o", "train.batch=64"]
    advice = "fully connected layers by channel"
    assert advice in said(capsys, *words) and advice not in said(capsys, *words, "-o", "train.local_steps=4")


def test_a_price(capsys, tmp_path):
    from dataclasses import replace

    from lockstep.spec.cluster_file import write_cluster

    cluster = find_cluster("8xH100")
    file = tmp_path / "priced.toml"
    file.write_text(write_cluster(replace(cluster, node=replace(cluster.node, price_hour=20.0))))
    out = said(capsys, "plan", "imagenet", "--cluster", str(file), "--goal", "cost")
    assert "price" in out.splitlines()[0]


@pytest.mark.gloo
def test_the_best_plan_is_executed(profile, tmp_path, capsys):
    """Of a run that compresses: it sends to the byte what was planned."""
    from lockstep.spec.cluster_file import write_cluster

    cluster = find_cluster("cpu-10g")
    place, plan = tmp_path / "here.toml", tmp_path / "plan.toml"
    place.write_text(write_cluster(cluster))
    words = ["--profile", str(profile), "--cluster", str(place), "--workers", "2", "--output", str(plan)]
    packed = [*SMALL, "-o", "train.compress=int8"]
    best = json.loads(said(capsys, "plan", *packed, *words, "--json"))["plans"][0]
    assert read_plan(str(plan)).workers == 2
    command = [sys.executable, "-m", "lockstep", "train", *packed, "--plan", str(plan), "--quiet"]
    command += ["--device", "cpu", "--runs-dir", str(tmp_path), "--name", "run"]
    subprocess.run(command, check=True, timeout=150)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 'compress = "int8"\n' in plan.read_text()  # a run without is told no seconds of this one
    assert summary["workers"] == 2 and summary["sent_mb_step"] == best["sent_bytes"] / 1e6
    parts = summary["predicted"]
    assert summary["predicted_from"] == "the plan's file"
    assert set(parts) == {"step_s", "compute_s", "exchange_s", "hidden_s", "host_s", "data_s"}
    whole = sum(parts[key][1] for key in ("compute_s", "exchange_s", "host_s", "data_s"))
    assert whole == pytest.approx(parts["step_s"][1], rel=0.5)
    assert all(measured >= 0 for _, measured in parts.values()) and parts["step_s"][1] > 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["shapes", "--cluster", "9xH100"], "unknown cluster '9xH100'"),
        (["shapes", "--cluster", "none.toml"], "none.toml: no such file"),
        (["shapes", *PRESET, "--goal", "fun"], "--goal fun must be time, cost or memory"),
        (["shapes", *PRESET, "--workers", "0"], "--workers 0 must be at least 1"),
        (["shapes", *PRESET, "--workers", "1000"], "no plan comes out for 1000 workers"),
        (["shapes", *PRESET, "--profile", "none.json"], "none.json: cannot read the file"),
        (["folder", *PRESET], "give --classes and --images"),
        (["shapes", *PRESET, "-o", "train.lanes=3"], "train.lanes=3 must be a power of two"),
    ],
)
def test_bad_input_is_one_line(words, says, capsys):
    assert run(["plan", *words]) == 2
    assert says in capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--batch", "0"], "--batch 0 must be whole numbers"),
        (["--parts", "pipeline=2"], "--parts pipeline=2 must be like"),
        (["--steps", "0"], "--steps 0 must be at least 1"),
        (["--output", "no/such/p.json"], "no/such/p.json: there is no such folder"),
        (["--picture", "layers.txt"], "--picture layers.txt: pictures are PNG files"),
    ],
)
def test_bad_profiles_are_refused_before_work(words, says, capsys):
    assert run(["profile", "shapes", *words]) == 2
    assert says in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_profile_of_another_model_is_refused(profile, capsys):
    assert run(["plan", "shapes", *PRESET, "-o", "model.name=emotion48", "--profile", str(profile)]) == 2
    assert "is of model.name=lenet5" in capsys.readouterr().err


def test_a_file_that_is_no_profile(tmp_path, capsys):
    path = tmp_path / "p.json"
    path.write_text("[1]")
    assert run(["plan", "shapes", *PRESET, "--profile", str(path)]) == 2
    assert "not a profile" in capsys.readouterr().err


def test_a_profile_of_another_device_is_told(profile, tmp_path, capsys):
    words = ["--profile", str(profile), "--workers", "2", "--json", "--output", str(tmp_path / "plan.toml")]
    assert run(["plan", *SMALL, *PRESET, *words]) == 0
    found = capsys.readouterr()
    assert "layers are only counted" in found.err and json.loads(found.out)["plans"]
