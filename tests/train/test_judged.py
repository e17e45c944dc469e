"""Early stopping by a metric, with weights of classes and a balanced order: one hash, resumed and killed."""

import json
import shutil

import forked
import pytest
import torch
from job import Job
from plan_runs import hashes, run
from small import rows, small_run, summary, train, train_command

import lockstep
from lockstep.cli.main import run as lockstep_command
from lockstep.data.class_labels import read_labels
from lockstep.errors import DataError, IdentityError, ModelError, SpecError
from lockstep.runs.event import Started
from lockstep.train.setup import set_up

KEYS = ("data.order=balanced", "train.class_weights=balanced", "data.num_train=134", "data.num_val=30")
JUDGED = ("evaluate.metrics=macro_f1,top5", "evaluate.best=macro_f1", "evaluate.patience=2")
RUN = (*KEYS, *JUDGED, "train.epochs=9", "train.lanes=8", "data.augment=flip", "optimizer.lr=0.2")
TOLD = ("stopped_early", "best_by", "best_value", "best_step", "metrics", "steps", "test_metrics")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    keys = ("checkpoint.every_steps=1", "checkpoint.keep=99")
    return train(small_run(*RUN, *keys), folder)[0].directory


def told(directory):
    found = summary(directory)
    return hashes(directory) | {key: found.get(key) for key in TOLD}


def test_it_stops_when_it_gets_no_better(alone, capsys):
    found, values = summary(alone), [row["val_macro_f1"] for row in rows(alone, "epoch")]
    ends = [row["step"] for row in rows(alone, "epoch")]
    best = values.index(max(values))
    assert len(values) == best + 3 < 9  # two that were no better
    assert found["stopped_early"] == {"after_epochs": len(values), "of": 9, "patience": 2}
    assert (found["best_by"], found["best_value"], found["best_step"]) == (
        "macro_f1",
        max(values),
        ends[best],
    )
    assert [row["best"] for row in rows(alone, "epoch")].count(True) >= 1 and found["epochs"] == len(values)
    words = ["eval", str(alone), "--device", "cpu", "--json", "--split", "val", "--checkpoint", "best"]
    assert lockstep_command(words) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["macro_f1"] == max(values)


@pytest.mark.gloo
@pytest.mark.parametrize("workers", [2, 3])
def test_one_hash(workers, alone, tmp_path):
    done = run(tmp_path, "--workers", str(workers), overrides=RUN)
    assert told(tmp_path / "run") == told(alone)
    values = [row["val_macro_f1"] for row in rows(alone, "epoch")]
    best = values.index(max(values)) + 1
    told_best = f"no better than epoch {best}, step {summary(alone)['best_step']}, whose weights stay"
    assert told_best in done.stdout and "--checkpoint best" in done.stdout


@pytest.mark.gloo
def test_a_loss_and_other_workers_stop_at_the_same_epoch(alone, tmp_path):
    with Job(tmp_path, "--workers", "2", overrides=RUN, paced=True) as job:
        job.wait_for_steps(5)  # in the second epoch
        job.lose_and_stop("1")
    done = forked.call(
        train_command(tmp_path, "--workers", "3", "--resume", "auto", overrides=RUN), launches=True
    )
    assert done.returncode == 0, done.stderr
    assert told(tmp_path / "run") == told(alone)


@pytest.mark.parametrize("back", [0, 1, 5])
def test_resumed(back, alone, tmp_path):
    """After its last step, which patience has ended already; in the last epoch; in the one before."""
    kept = summary(alone)["steps"] - back
    shutil.copytree(alone, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    for path in (tmp_path / "run" / "checkpoints").glob("step-*"):
        if int(path.stem.removeprefix("step-")) > kept:
            path.unlink()
    again, events = train(small_run(*RUN), tmp_path, launch={"name": None, "resume": str(tmp_path / "run")})
    assert told(again.directory) == told(alone)
    assert next(event for event in events if isinstance(event, Started)).resumed_step == kept
    more, _ = train(small_run(*RUN), tmp_path, launch={"name": None, "resume": str(tmp_path / "run")})
    assert told(more.directory) == told(alone)  # finished already


def test_what_decides_is_part_of_the_run_and_what_does_not_is_none(alone, tmp_path):
    device, plain = torch.device("cpu"), small_run(*KEYS)
    identity = set_up(plain, device).identity
    assert set_up(small_run(*KEYS, "evaluate.metrics=top5"), device).identity == identity
    assert not [key for key in set_up(small_run(), device).identity if key.startswith("evaluate")]
    assert "train.class_weights" not in set_up(small_run(), device).identity
    resume = lockstep.Launch(runs_dir=tmp_path, device="cpu", resume=str(alone))
    with pytest.raises(IdentityError, match=r"evaluate\.patience: 2 there, 3 here"):
        lockstep.train(small_run(*RUN, "evaluate.patience=3"), launch=resume)


def test_a_function_that_judges_is_part_of_the_run(tmp_path):
    def make(power):
        return lambda outputs, labels: (outputs.argmax(1) == labels).double().mean() ** power

    keys = ("evaluate.best=own", "train.epochs=1", "data.num_train=64", "data.num_test=8")
    first, _ = train(small_run(*keys), tmp_path, metrics={"own": make(1)})
    assert first.summary["best_by"] == "own" and "best_accuracy" not in first.summary
    resume = {"name": None, "resume": str(first.directory)}
    with pytest.raises(IdentityError, match=r"source\.metrics\.own"):
        train(small_run(*keys), tmp_path, metrics={"own": make(2)}, launch=resume)
    again, _ = train(small_run(*keys), tmp_path, metrics={"own": make(1)}, launch=resume)
    assert again.summary == first.summary


def test_weights_are_by_the_counts_of_the_training_images(tmp_path):
    setup = set_up(small_run(*KEYS), torch.device("cpu"))
    counts = torch.bincount(read_labels(setup.store.train), minlength=10).double()
    assert torch.tensor(setup.loss.weights).double() == pytest.approx(134 / (10 * counts))
    weights = torch.tensor(setup.loss.weights)[read_labels(setup.store.train)]
    assert float(weights.double().mean()) == pytest.approx(1.0)
    given = set_up(small_run("train.class_weights=[1,2,3,4,5,6,7,8,9,0.5]"), torch.device("cpu"))
    assert given.loss.weights == (1, 2, 3, 4, 5, 6, 7, 8, 9, 0.5)


def test_what_cannot_be_is_refused_before_any_work(tmp_path):
    cases = [
        (("train.class_weights=1,2",), ModelError, "2 numbers, and shapes has 10 classes"),
        (
            ("train.loss=squared_error", "kernels.set=fused"),
            ModelError,
            "fused: it has no loss but cross_entr",
        ),
        (("evaluate.best=iou",), SpecError, "evaluate.best=iou: unknown metric 'iou'"),
        (
            ("train.loss=mse",),
            ModelError,
            "shapes has one class for each image: use cross_entropy or squared",
        ),
    ]
    for keys, kind, message in cases:
        with pytest.raises(kind, match=message):
            train(small_run(*keys), tmp_path)
        assert not list(tmp_path.iterdir()), message
    with pytest.raises(SpecError, match="works with loss=cross_entropy only"):
        small_run("train.class_weights=balanced", "train.loss=squared_error")
    with pytest.raises(DataError, match=r"train\.batch"):
        train(small_run("train.batch=512"), tmp_path)
