"""The promise where a plan names layers: the weights of one worker, also after another plan."""

import os
import signal

import forked
import pytest
from job import Job
from small import command, summary, train_command

EVERYTHING = (
    "train.lanes=8",
    "train.epochs=1",
    "train.slices=4",
    "data.augment=flip,crop",
    "train.ema=0.9",
    "train.clip=1.0",
)
DROPOUT = (
    *("train.lanes=4", "train.epochs=1", "train.slices=4", "train.clip=1.0", "optimizer.name=sgd"),
    *("train.batch=16", "data.num_train=40", "data.num_test=21", "model.name=alexnet", "data.size=64"),
)
HASHES = ("weights_sha256", "optimizer_sha256", "ema_sha256", "loss", "accuracy", "identity")
PLANS = [
    (EVERYTHING, "data=2,layers=hidden1/hidden2"),
    (EVERYTHING, "data=3,layers=hidden2"),
    (EVERYTHING, "data=4,layers=classifier:data/*"),
    (DROPOUT, "data=3,layers=hidden*"),
]


def hashes(directory):
    found = summary(directory)
    return {key: found.get(key) for key in HASHES}


def run(tmp_path, *arguments, overrides):
    done = forked.call(train_command(tmp_path, *arguments, overrides=overrides), launches=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def reference(by_one_worker):
    """The hashes of a run by one worker."""
    return lambda overrides: {key: by_one_worker(*overrides).get(key) for key in HASHES}


@pytest.mark.gloo
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("overrides", "plan"), PLANS, ids=[plan for _, plan in PLANS])
def test_layers_over_workers_give_the_bits_of_one_worker(overrides, plan, reference, tmp_path):
    run(tmp_path, "--plan", plan, overrides=overrides)
    assert hashes(tmp_path / "run") == reference(overrides)
    for layer in summary(tmp_path / "run")["by_channel"]:
        assert len(layer["sent_mb"]) == int(plan[5]) and max(layer["sent_mb"]) > 0


@pytest.mark.gloo
@pytest.mark.timeout(600)
def test_a_run_goes_on_under_another_plan(reference, tmp_path):
    overrides = (*EVERYTHING, "checkpoint.keep=99")
    (tmp_path / "plan.toml").write_text('data = 2\n[layers]\nclassifier = "data"\n"hidden*" = "channel"\n')
    run(tmp_path, "--plan", "data=3,layers=hidden1", overrides=overrides)
    saved, plan = tmp_path / "run" / "checkpoints", str(tmp_path / "plan.toml")
    for step, flags in ((3, ["--plan", plan]), (6, ["--plan", "data=2,shard=parameters"]), (9, [])):
        later = [path for path in saved.glob("step-*") if int(path.stem[5:]) > step]
        for path in (*later, tmp_path / "run" / "summary.json"):
            path.unlink()
        run(tmp_path, *flags, "--resume", str(tmp_path / "run"), overrides=overrides)
        found = hashes(tmp_path / "run")
        assert found == reference(EVERYTHING) | {"identity": found["identity"]}
    flags = ["--plan", "data=2,layers=hidden1", "--device", "cpu"]
    done = forked.call(command("eval", str(tmp_path / "run"), *flags), launches=True)
    assert done.returncode == 0 and f"loss {summary(tmp_path / 'run')['loss']:.4f}" in done.stdout, done


@pytest.mark.gloo
@pytest.mark.timeout(600)
def test_a_lost_worker_costs_no_bit(reference, tmp_path):
    with Job(tmp_path, "--plan", "data=2,layers=hidden1", overrides=EVERYTHING, paced=True) as job:
        job.wait_for_steps(4)
        os.kill(job.workers()["1"], signal.SIGKILL)
        job.wait_for(lambda: "1" not in job.workers(), "the loss")
        job.hurry()
        job.process.communicate()
        assert job.process.returncode == 0, job.errors()
    assert hashes(tmp_path / "run") == reference(EVERYTHING)


def test_what_layers_cannot_do_is_refused_before_it_starts(tmp_path):
    for plan, overrides, text in (
        ("data=2,layers=block1", (), "'block1' fits no fully connected layer"),
        ("data=2,layers=nothing", (), "'nothing' fits no layer"),
        ("data=2,layers=classifier", ("train.slices=16",), "has 10 outputs, fewer than train.slices=16"),
        ("data=2,layers=hidden1", ("train.slices=1",), "set train.slices=2, which is part of the identity"),
        ("data=2,layers=hidden1,shard=optimizer", (), "goes with data alone, not with shard"),
        ("layers=hidden1", (), "layers are over 1 worker: give 2 or more"),
        ("data=2,layers=hidden1", ("kernels.set=fused",), "fused kernels have no such grid"),
        (
            "data=2,layers=hidden1",
            ("kernels.set=fused", "train.slices=1"),
            "fused kernels compute whole layers only",
        ),
    ):
        flags = train_command(tmp_path, "--plan", plan, overrides=("train.slices=4", *overrides))
        done = forked.call(flags, launches=True)
        assert done.returncode == 2 and text in done.stderr, (plan, done.stderr)
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not (tmp_path / "run").exists()
