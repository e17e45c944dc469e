"""Checkpoints written beside training: what is in them, how far they may lag, kills meanwhile."""

import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forked import Forked, call
from job import Job
from patience import PATIENCE_S
from small import rows, small_run, summary, train, train_command
from world import in_threads

from lockstep.runs import checkpoint, state_parts
from lockstep.runs.event import CheckpointSaved, Notice, StepDone
from lockstep.runs.saving.checkpoint_writer import CheckpointWriter
from lockstep.runs.state_parts import StatePiece

FULL = ("train.ema=0.9", "optimizer.name=adamw", "optimizer.lr=0.003", "data.augment=flip,crop")
KILLED = Path(__file__).with_name("killed_writer.py")
POINTS = ("copying", "writing", "hashing", "between the files", "the manifest is there", "pruning")


def manifests(run):
    """What the checkpoints say by step, without what is said of files."""
    found = {}
    for step, path in checkpoint.checkpoint_steps(run / "checkpoints").items():
        manifest = checkpoint.load_checkpoint(path).manifest
        found[step] = {key: value for key, value in manifest.items() if key not in ("identity", "bytes")}
    return found


def test_it_holds_the_state_of_its_step_however_late_it_is_written(tmp_path, monkeypatch):
    """Each is held back until training waits for it: that is where the next one is due, and at the end."""
    prompt, _ = train(small_run(*FULL, "checkpoint.every_steps=1", "checkpoint.keep=99"), tmp_path / "prompt")
    go_on = threading.Semaphore(0)
    settle, commit = CheckpointWriter.settle, checkpoint.NewCheckpoint.commit

    def release(writer, wait=False):
        if wait and writer.step >= 0:
            go_on.release()
        settle(writer, wait)

    def commit_late(new):
        go_on.acquire()
        commit(new)

    monkeypatch.setattr(CheckpointWriter, "settle", release)
    monkeypatch.setattr(checkpoint.NewCheckpoint, "commit", commit_late)
    late, events = train(
        small_run(*FULL, "checkpoint.every_steps=4", "checkpoint.keep=99"), tmp_path / "late"
    )
    steps = [event.step for event in events if isinstance(event, StepDone | CheckpointSaved)]
    due = [0, 4, 8, 10, 12, 16, 20]
    expected = list(range(1, 21))
    for saved, following in zip(due, [*due[1:], 20], strict=True):  # told right after the next due step
        expected.insert(expected.index(following) + 1 + (saved == 20), saved)
    assert steps == expected
    found, wanted = manifests(late.directory), manifests(prompt.directory)
    assert found == {step: wanted[step] for step in due}
    assert late.summary["weights_sha256"] == prompt.summary["weights_sha256"]


def test_a_disk_that_fails_for_a_while_is_told_and_the_next_one_is_written(tmp_path, monkeypatch):
    commit = checkpoint.NewCheckpoint.commit

    def fail(new):
        if new.step == 3:
            new.discard()
            raise OSError(28, "No space left on device")
        commit(new)

    monkeypatch.setattr(checkpoint.NewCheckpoint, "commit", fail)
    result, events = train(small_run("train.epochs=1", "checkpoint.keep=9"), tmp_path)
    (told,) = [each.text for each in events if isinstance(each, Notice) and "NOT saved" in each.text]
    assert told.startswith(
        "checkpoint of step 3 NOT saved: No space left on device; training goes on and earl"
    )
    assert sorted(manifests(result.directory)) == [0, 6, 9, 10]
    assert not list((result.directory / "checkpoints").glob(".*"))


def test_an_error_that_is_no_disk_s_ends_the_run(tmp_path, monkeypatch):
    def fail(new):
        raise ValueError("not of the disk")

    monkeypatch.setattr(checkpoint.NewCheckpoint, "commit", fail)
    with pytest.raises(ValueError, match="not of the disk"):
        train(small_run("train.epochs=1"), tmp_path)


def test_kills_at_every_point_lose_nothing_that_was_whole(tmp_path):
    """One run, killed in its 2nd, 4th … checkpoint, each time at another point, and resumed."""
    keys = (*FULL, "train.epochs=1", "data.num_train=448", "checkpoint.every_steps=1")
    whole, _ = train(small_run(*keys), tmp_path / "whole")
    command = train_command(tmp_path, "--resume", "auto", overrides=keys)
    for number, point in enumerate(POINTS):
        at = 2 * number + 2
        variables = {"POINT": point, "AT": str(at), "MARK": str(tmp_path / f"mark-{number}")}
        killed = [command[0], "-W", "error", str(KILLED), *command[command.index("train") :]]
        with Forked(killed, {**os.environ, **variables}) as process:
            done = process.finish()
        assert done.returncode == -signal.SIGKILL, (point, done.stderr)
        saved = checkpoint.load_newest(tmp_path / "run" / "checkpoints", pytest.fail)
        is_whole = point in ("the manifest is there", "pruning")
        assert saved.manifest["cursor"]["step"] == (at if is_whole else at - 1), point
    done = call(command)
    assert done.returncode == 0, done.stderr
    found = summary(tmp_path / "run")
    for key in ("weights_sha256", "optimizer_sha256", "ema_sha256", "accuracy", "loss", "identity"):
        assert found[key] == whole.summary[key], key
    assert [row["step"] for row in rows(tmp_path / "run", "step")] == list(range(1, 15))
    assert not list((tmp_path / "run" / "checkpoints").glob(".*")), "what was left is removed"


@pytest.mark.gloo
@pytest.mark.parametrize("all_see", [True, False])
def test_parts_are_a_checkpoint_once_all_have_written_theirs(tmp_path, monkeypatch, all_see):
    """Worker 1 is late; if it does not see the folder, worker 0 gets its part and writes it at once."""
    go_on, here, access = threading.Event(), threading.local(), os.access
    put = state_parts.PartsFile.put

    def put_late(file, piece):
        assert not piece.start or go_on.wait(PATIENCE_S)
        put(file, piece)

    monkeypatch.setattr(state_parts.PartsFile, "put", put_late)
    monkeypatch.setattr(os, "access", lambda path, mode: (all_see or here.rank == 0) and access(path, mode))

    def work(group):
        here.rank, told = group.rank, []
        own = StatePiece("model.w", (4,), 2 * group.rank, torch.tensor([0.0, 1.0]) + 2 * group.rank)
        state = SimpleNamespace(step=3, parts=state_parts.StateParts(group), pieces=lambda: [own])
        new = checkpoint.NewCheckpoint(tmp_path / "new", {"step": 3, "best_step": -1}, "identity", 1)
        writer = CheckpointWriter(lambda *report: told.append(report))
        writer.begin(state, None if group.rank else new)
        own.tensor.fill_(9.0)
        writer.settle()
        assert not all_see or (writer.step == 3 and not told), "worker 1 has not written its part"
        group.barrier()
        go_on.set()
        writer.settle(wait=True)
        writer.close()
        return [(new.step, error) for new, error in told]

    assert in_threads(2, work) == [[(3, None)], []]
    saved = checkpoint.load_newest(tmp_path / "new", pytest.fail)
    assert saved.tensors["model.w"].tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.gloo
@pytest.mark.parametrize("name", ["0", "1"])
def test_a_worker_that_dies_writing_its_part_takes_no_checkpoint_along(tmp_path, name):
    """Two stages, each with a part of the state: both go back to the last whole checkpoint."""
    keys = ("train.epochs=1", "checkpoint.every_steps=4")
    words = train_command(tmp_path, "--plan", "pipeline=2", overrides=keys)
    words[1:] = ["-W", "error", str(KILLED), *words[words.index("train") :]]
    mark = tmp_path / "mark"
    variables = {"POINT": "writing", "AT": "8", "MARK": str(mark), "NAME": name}
    with Job(tmp_path, command=words, env=variables) as job:
        job.finish()
    assert mark.exists()
    whole, _ = train(small_run(*keys), tmp_path / "whole")
    assert job.hashes()["weights_sha256"] == whole.summary["weights_sha256"]
    saved = manifests(tmp_path / "run")
    assert max(saved) == 10 and not list((tmp_path / "run" / "checkpoints").glob(".*"))
    (lost,) = job.generations()
    assert json.dumps(lost).count(f"worker {name} on") == 1 and sys.platform == "linux"
