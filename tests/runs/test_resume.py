import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import time

import pytest
import torch
from forked import Forked, call
from patience import PATIENCE_S
from small import command, rows, small_run, summary, train, train_command
from torch import nn

import lockstep
from lockstep.errors import IdentityError, LockstepError
from lockstep.runs.about import About
from lockstep.runs.directory import RunDirectory
from lockstep.runs.event import Notice
from lockstep.runs.resume import reopen_directory
from lockstep.spec.identity import digest
from lockstep.spec.run_file import dump_toml

# All that reduces, remembers or draws at random is on, so that a resume that forgets any of it shows.
FULL = (
    "model.name=emotion48",
    "model.dropout=0.3",
    "data.augment=flip,crop,cutout",
    "train.ema=0.9",
    "train.clip=1.0",
    "train.epochs=3",
    "optimizer.name=adamw",
    "optimizer.lr=0.003",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that was never stopped."""
    result, _ = train(small_run(*FULL), tmp_path_factory.mktemp("whole"))
    return result.summary


def test_a_directory_that_cannot_be_taken_over_is_named_with_the_way_out(tmp_path):
    result, _ = train(small_run("train.epochs=1"), tmp_path / "calm")
    about = About(small_run(), RunDirectory(result.directory).identity(), "", "", 0, 0, 0, (), ())
    (tmp_path / "file").touch()
    with pytest.raises(
        LockstepError, match=r"file/runs/run cannot be kept by .*: Not a directory; give --ru"
    ):
        reopen_directory(tmp_path / "file" / "runs" / "run", about, print, is_lost=False)
    directory, _ = reopen_directory(tmp_path / "far" / "runs" / "run", about, print, is_lost=False)
    assert directory.identity() == about.identity, "where it never was, it is made with all above it"
    directory.close()


def assert_same(directory, whole, epochs=3, batch=32):
    found = summary(directory)
    for key in ("weights_sha256", "optimizer_sha256", "ema_sha256", "accuracy", "loss", "identity"):
        assert found[key] == whole[key], key
    used = [(row["epoch"], row["positions"][0]) for row in rows(directory, "step")]
    assert used == [(epoch, batch * step) for epoch in range(epochs) for step in range(10)]


def test_twenty_kills_and_the_bits_of_the_run_that_was_never_killed(tmp_path):
    longer = (*FULL, "train.epochs=8", "train.batch=16", "data.num_train=165")
    whole, _ = train(small_run(*longer), tmp_path / "whole")
    moments = random.Random(0)
    arguments = train_command(tmp_path, "--resume", "auto", overrides=longer)
    for _ in range(20):
        with Forked(arguments) as process:
            wanted = progress(tmp_path) + moments.randrange(3)
            while progress(tmp_path) <= wanted and process.poll() is None:
                time.sleep(0.002)
            time.sleep(moments.random() * 0.02)  # anywhere in a step, a save or an evaluation
            assert process.poll() is None, "the run ended before twenty kills"
            process.kill()
            assert process.finish().returncode == -signal.SIGKILL
    done = call(arguments)
    assert done.returncode == 0, done.stderr
    assert_same(tmp_path / "run", whole.summary, epochs=8, batch=16)


def progress(runs_dir):
    """Rows written so far."""
    try:
        return (runs_dir / "run" / "metrics.jsonl").read_text().count("\n")
    except OSError:
        return 0


def wait_for_rows(count, runs_dir, process):
    while progress(runs_dir) < count:
        assert process.poll() is None, "the run ended"
        time.sleep(0.01)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_says_how_to_go_on(tmp_path, whole, number, code):
    with Forked(train_command(tmp_path, overrides=FULL), draws=True) as process:
        wait_for_rows(4, tmp_path, process)
        os.kill(process.pid, number)
        done = process.finish()
    assert done.returncode == code
    heard, stopped = done.stderr.splitlines()
    assert heard.startswith(f"lockstep: {number.name}: saving after this step; once more ends")
    assert f"lockstep train --resume {tmp_path / 'run'}" in stopped
    done = call(command("train", "--resume", str(tmp_path / "run"), "--device", "cpu"))
    assert done.returncode == 0, done.stderr
    assert_same(tmp_path / "run", whole)


def test_a_signal_saves_where_nobody_can_be_told(tmp_path):
    arguments = ["sh", "-c", 'exec "$@" 2>&-', "sh", *train_command(tmp_path, overrides=FULL)]
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL) as process:
        wait_for_rows(4, tmp_path, process)
        process.terminate()
        assert process.wait(PATIENCE_S) == 143
    steps = [row["step"] for row in rows(tmp_path / "run", "step")]
    assert (tmp_path / "run" / "checkpoints" / f"step-{steps[-1]:09}.safetensors").exists()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run stopped after 14 steps, its last checkpoint being at 12."""

    def stop(event):
        if getattr(event, "step", 0) == 14:
            raise InterruptedError

    folder = tmp_path_factory.mktemp("stopped")
    with pytest.raises(InterruptedError):
        train(small_run(*FULL), folder, on_event=stop)
    return folder / "run"


@pytest.fixture
def interrupted(stopped, tmp_path):
    """A copy of it, which a test may change."""
    return shutil.copytree(stopped, tmp_path / "run")


@pytest.mark.parametrize("damage", ["flip", "truncate", "missing", "manifest"])
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(tmp_path, whole, interrupted, damage):
    newest = sorted((interrupted / "checkpoints").glob("*.safetensors"))[-1]
    data = bytearray(newest.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
        newest.write_bytes(data)
    elif damage == "truncate":
        newest.write_bytes(data[: len(data) // 2])
    elif damage == "missing":
        newest.unlink()
    else:
        newest.with_suffix(".json").write_text("{")
    _, events = train(small_run(*FULL), tmp_path, launch={"resume": "auto"})
    assert any(isinstance(e, Notice) and e.warning and newest.stem in e.text for e in events)
    assert_same(interrupted, whole)


def test_resume_from_one_checkpoint_by_its_path(tmp_path, whole, interrupted):
    oldest = sorted((interrupted / "checkpoints").glob("*.json"))[0]
    train(small_run(*FULL), tmp_path, launch={"resume": str(oldest)})
    assert_same(interrupted, whole)


def test_another_identity_is_refused_with_the_fields_and_the_way_out(tmp_path, interrupted):
    with pytest.raises(IdentityError) as caught:
        train(small_run(*FULL, "train.epochs=5", "seed=3"), tmp_path, launch={"resume": "auto"})
    text = str(caught.value)
    assert "seed: 0 there, 3 here" in text and "train.epochs: 3 there, 5 here" in text
    assert f"--fork {interrupted}" in text


def write_in_old_form(run, **changes):
    """As runs lay on disk before a lane was part of the identity, perhaps with other fields."""
    path = run / "identity.json"
    identity = {**json.loads(path.read_text()), **changes}
    assert len(identity.pop("numerics.lane")) == 16
    path.write_text(json.dumps(identity, indent=1) + "\n")
    for path in (run / "checkpoints").glob("*.json"):
        manifest = json.loads(path.read_text())
        del manifest["seal"]
        manifest["identity"] = digest(identity)
        manifest["seal"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
        path.write_text(json.dumps(manifest, indent=1) + "\n")
    return digest(identity)


def test_a_run_begun_before_its_lane_was_hashed_goes_on(tmp_path, whole, interrupted):
    old = write_in_old_form(interrupted)
    train(small_run(*FULL), tmp_path, launch={"resume": "auto"})
    assert_same(interrupted, {**whole, "identity": old})
    assert lockstep.load(interrupted) is not None  # its checkpoints are of its own identity


@pytest.mark.parametrize("key", ["numerics.probe", "numerics.lane"])
def test_a_machine_with_other_numerics_is_refused(tmp_path, interrupted, key):
    """By the lane; a run that was begun without one by the probe that all have."""
    if key == "numerics.probe":
        write_in_old_form(interrupted, **{key: "0123456789abcdef"})
    else:
        path = interrupted / "identity.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), key: "0123456789abcdef"}))
    with pytest.raises(IdentityError, match=rf"{key}: 0123456789abcdef there, \w{{16}} here. Go on where"):
        train(small_run(*FULL), tmp_path, launch={"resume": "auto"})


def test_resuming_a_finished_run_does_nothing(tmp_path):
    first, _ = train(small_run("train.epochs=1"), tmp_path)
    before = {path: path.stat().st_mtime_ns for path in first.directory.rglob("*") if path.is_file()}
    again, events = train(small_run("train.epochs=1"), tmp_path, launch={"resume": "auto"})
    assert again.summary == first.summary
    assert any(isinstance(e, Notice) and "finished already" in e.text for e in events)
    after = {path: path.stat().st_mtime_ns for path in first.directory.rglob("*") if path.is_file()}
    assert before == after


def test_resume_auto_without_a_run_starts_one(tmp_path):
    result, events = train(small_run("train.epochs=1"), tmp_path, launch={"resume": "auto"})
    assert result.summary["steps"] == 10
    assert any(isinstance(e, Notice) and "starting a new one" in e.text for e in events)


def test_a_fork_starts_from_the_weights_and_can_train_longer(tmp_path):
    first, _ = train(small_run("train.epochs=1"), tmp_path)
    forked = ("train.epochs=1", "seed=4")
    done = call(train_command(tmp_path, "--fork", str(first.directory), overrides=forked))
    assert done.returncode == 0, done.stderr
    assert "starting from the weights of" in done.stdout
    assert (tmp_path / "run-2").is_dir()
    assert summary(tmp_path / "run") == first.summary
    assert summary(tmp_path / "run-2")["loss"] < first.summary["loss"]


def test_a_forked_run_resumes_when_its_source_is_gone(tmp_path):
    first, _ = train(small_run("train.epochs=1"), tmp_path)
    weights = sorted((first.directory / "checkpoints").glob("*.safetensors"))[-1]
    copy = tmp_path / "weights.safetensors"
    copy.write_bytes(weights.read_bytes())
    run = small_run(f"model.weights={copy}")
    expected, _ = train(run, tmp_path, launch={"name": "expected"})

    def stop(event):
        if getattr(event, "step", 0) == 5:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train(run, tmp_path, launch={"name": "forked"}, on_event=stop)
    copy.unlink()
    result, _ = train(run, tmp_path, launch={"name": "forked", "resume": "auto"})
    assert result.summary["weights_sha256"] == expected.summary["weights_sha256"]


def test_a_head_of_another_size_starts_anew_and_that_is_said(tmp_path):
    first, _ = train(small_run("train.epochs=1"), tmp_path)
    weights = sorted((first.directory / "checkpoints").glob("*.safetensors"))[-1]
    run = small_run("train.epochs=1", "data.classes=4", f"model.weights={weights}")
    _, events = train(run, tmp_path)
    assert any(isinstance(e, Notice) and "head has another size" in e.text for e in events)


def test_two_processes_never_train_in_one_directory(tmp_path):
    with Forked(train_command(tmp_path, overrides=("train.epochs=500",))) as process:
        wait_for_rows(2, tmp_path, process)
        done = call(train_command(tmp_path, "--resume", "auto", overrides=("train.epochs=500",)))
        assert done.returncode == 1 and "another process" in done.stderr


def test_the_resolved_run_is_what_was_saved(tmp_path):
    run = small_run(*FULL, "train.epochs=1")
    result, _ = train(run, tmp_path)
    assert (result.directory / "run.toml").read_text() == dump_toml(run)
    assert isinstance(lockstep.load(result.directory).training, bool)


def test_a_checkpoint_of_another_run_is_refused(tmp_path, interrupted):
    other, _ = train(small_run(*FULL, "seed=7"), tmp_path, launch={"name": "other"})
    for path in (interrupted / "checkpoints").iterdir():
        path.unlink()
    for path in (other.directory / "checkpoints").iterdir():
        (interrupted / "checkpoints" / path.name).write_bytes(path.read_bytes())
    with pytest.raises(IdentityError, match="checkpoint of another run"):
        train(small_run(*FULL), tmp_path, launch={"resume": "auto"})


def test_a_head_of_zeros_resumes_to_the_same_bits(tmp_path):
    """Zeros hide differences between ways to run lanes; a resumed run must choose the same way."""

    def make():
        torch.manual_seed(1)
        layers = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10)]
        nn.init.zeros_(layers[-1].weight)
        nn.init.zeros_(layers[-1].bias)
        return nn.Sequential(*layers)

    def stop(event):
        if getattr(event, "step", 0) == 5:
            raise InterruptedError

    run = small_run("train.epochs=1", "train.lanes=8")
    whole, _ = train(run, tmp_path / "whole", model=make())
    with pytest.raises(InterruptedError):
        train(run, tmp_path, model=make(), on_event=stop)
    resumed, _ = train(run, tmp_path, model=make(), launch={"resume": "auto"})
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]


def test_a_script_without_a_name_and_a_seed_goes_on_by_auto(tmp_path):
    def stop(event):
        if getattr(event, "step", 0) == 2:
            raise InterruptedError

    def net():
        return nn.Sequential(nn.Flatten(), nn.Linear(16 * 16, 10))  # other weights each time

    keys, launch = small_run("train.epochs=1"), {"name": None}
    with pytest.raises(InterruptedError):
        train(keys, tmp_path, model=net(), launch=launch, on_event=stop)
    result, _ = train(keys, tmp_path, model=net(), launch={**launch, "resume": "auto"})
    assert [path.name for path in tmp_path.iterdir()] == [result.directory.name]
