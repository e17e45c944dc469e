"""A batch that grows: steps and rates by hand, one hash by any workers, plan and way, resumed, refused."""

import shutil

import forked
import pytest
import torch
from job import Job, assert_no_step_lost
from plan_runs import hashes, run
from small import rows, small_run, summary, train, train_command

import lockstep
from lockstep.errors import DataError, IdentityError, SpecError
from lockstep.runs.event import Started
from lockstep.spec.plan import Plan
from lockstep.spec.plan_check import check_plans
from lockstep.train.setup import set_up

GROWS = ("train.batch=16@0,32@1,64@3", "train.epochs=4", "train.lanes=8", "data.num_train=134")
RUN = (*GROWS, "optimizer.scale=linear", "schedule.warmup_epochs=1.5", "train.ema=0.9", "train.clip=1.0")
STEPS = [8, 4, 4, 2]  # of each epoch: 134 // batch


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return train(small_run(*RUN, "checkpoint.every_steps=1", "checkpoint.keep=99"), folder)[0].directory


def test_steps_and_rates_by_hand(alone):
    """A rate is of the share of the epochs that are done, times that of the epoch's batch."""
    schedule, told = small_run(*RUN).schedule, rows(alone, "step")
    assert [row["epoch"] for row in told] == [epoch for epoch, n in enumerate(STEPS) for _ in range(n)]
    for row in told:
        epoch, steps = row["epoch"], STEPS[row["epoch"]]
        batch, done = [16, 32, 32, 64][epoch], epoch * steps + row["step_in_epoch"] - 1
        assert row["lr"] == schedule.rate(batch / 256 * 0.05, done, 4 * steps, steps)
        assert row["positions"] == [(row["step_in_epoch"] - 1) * batch, row["step_in_epoch"] * batch]
    warm = [row["lr"] for row in told if row["epoch"] < 2]
    assert warm[:8] == [16 / 256 * 0.05 * (n + 1) / 12 for n in range(8)]  # 1.5 epochs of 8 steps
    assert warm[8:10] == [32 / 256 * 0.05 * (n + 1) / 6 for n in (4, 5)]  # and of 4 steps
    assert [row["train_loss"] for row in rows(alone, "epoch")] == pytest.approx(
        [sum(row["loss"] for row in told if row["epoch"] == epoch) / STEPS[epoch] for epoch in range(4)]
    )
    assert summary(alone)["steps"] == sum(STEPS)


def test_without_scale_the_rate_is_that_of_the_epoch(tmp_path):
    keys = ("schedule.name=linear", "data.num_test=10")
    grown = train(small_run(*GROWS, *keys), tmp_path)[0].directory
    plain = train(small_run(*GROWS, *keys, "train.batch=16"), tmp_path)[0].directory
    rates = [
        {(row["epoch"], row["positions"][0]): row["lr"] for row in rows(f, "step")} for f in (grown, plain)
    ]
    for place, rate in rates[0].items():
        assert rate == pytest.approx(rates[1][place])


def test_it_is_part_of_the_run_and_one_batch_is_what_it_was(by_one_worker, alone, tmp_path):
    same = ("weights_sha256", "identity", "loss")
    plain, written = by_one_worker(), by_one_worker("train.batch=32@0")
    assert [plain[key] for key in same] == [written[key] for key in same]
    device = torch.device("cpu")
    identity = set_up(small_run(*RUN), device).identity
    assert identity["train.batch"] == "16@0,32@1,64@3" and "train.growth" not in identity
    assert [row["batch"] for row in identity["numerics.by_batch"]] == [32, 64]
    assert "numerics.by_batch" not in set_up(small_run(), device).identity
    again = lockstep.Launch(runs_dir=tmp_path, device="cpu", resume=str(alone))
    with pytest.raises(IdentityError, match=r"train\.batch: 16@0,32@1,64@3 there, 16@0,32@2,64@3 here"):
        lockstep.train(small_run(*RUN, "train.batch=16@0,32@2,64@3"), launch=again)


@pytest.mark.gloo
@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_one_hash(workers, alone, tmp_path):
    run(tmp_path, "--workers", str(workers), overrides=RUN)
    assert hashes(tmp_path / "run") == hashes(alone)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("plan", "keys"),
    [
        ("pipeline=2", ()),
        ("data=2,shard=optimizer", ()),
        ("data=2,shard=parameters", ()),
        ("channel=2", ()),
        ("spatial=2", ("train.bands=2",)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_hash_by_every_plan(plan, keys, by_one_worker, tmp_path):
    keys = (*RUN, *keys)
    run(tmp_path, "--workers", "2", "--plan", plan, overrides=keys)
    found = by_one_worker(*keys)
    assert hashes(tmp_path / "run") == {key: found.get(key) for key in hashes(tmp_path / "run")}


@pytest.mark.parametrize("kept", [3, 8, 10, 16])
def test_resumed(kept, alone, tmp_path):
    """In the first stage, where the second begins, in its middle, and where the last begins."""
    shutil.copytree(alone, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    for path in (tmp_path / "run" / "checkpoints").glob("step-*"):
        if int(path.stem.removeprefix("step-")) > kept:
            path.unlink()
    run_, events = train(small_run(*RUN), tmp_path, launch={"name": None, "resume": str(tmp_path / "run")})
    assert hashes(run_.directory) == hashes(alone)
    assert [row["step"] for row in rows(run_.directory, "step")] == list(range(1, sum(STEPS) + 1))
    assert next(event for event in events if isinstance(event, Started)).resumed_step == kept


@pytest.mark.gloo
def test_a_loss_and_other_workers_across_the_boundary(alone, tmp_path):
    with Job(tmp_path, "--workers", "3", overrides=RUN, paced=True) as job:
        job.wait_for_steps(7)  # the batch grows after the eighth
        job.lose_and_stop("1")
    done = forked.call(
        train_command(tmp_path, "--workers", "2", "--resume", "auto", overrides=RUN), launches=True
    )
    assert done.returncode == 0, done.stderr
    assert_no_step_lost(tmp_path / "run")
    assert hashes(tmp_path / "run") == hashes(alone)


def test_wrong_batches_are_one_line(tmp_path):
    for batch, error in {
        "16@1": r"must be a whole number, or batches with their first epochs, from 0 on and rising",
        "16@0,32": r"train\.batch=16@0,32 must be",
        "16@0,32@2,64@1": r"must be a whole number",
        "16@0,": r"must be a whole number",
        "16@0,20@1": r"train\.batch=20 is not divisible by train\.lanes=8: .* use batch 24 or 16",
        "16@0,32@4": r"32@4 begins after the last epoch, as train\.epochs=4",
    }.items():
        with pytest.raises(SpecError, match=error):
            small_run(*RUN, f"train.batch={batch}")
    with pytest.raises(SpecError, match="unknown key 'growth'"):
        small_run("train.growth=64@1")
    with pytest.raises(DataError, match=r"train\.batch=256 is more than the 134 training images"):
        train(small_run(*RUN, "train.batch=16@0,256@1"), tmp_path)
    with pytest.raises(DataError, match=r"mixup needs two samples a lane"):
        train(small_run(*RUN, "train.batch=16@0,8@1", "data.augment=mixup"), tmp_path)
    with pytest.raises(SpecError, match=r"layers=fc1: not with train\.batch=16@0,32@1,64@3, as each worker"):
        check_plans([Plan(data=2, layers=("fc1",))], small_run(*RUN), 2)


def test_warnings_are_about_every_batch(tmp_path):
    keys = (*GROWS, "train.batch=16@0,128@1,80@2", "model.name=resnet18", "data.size=8")
    warnings = "".join(set_up(small_run(*keys), torch.device("cpu")).warnings)
    assert "every epoch with batch 80 leaves out 54 of 134 images" in warnings
    assert "batch norm over 2 samples a lane (train.batch=16 / train.lanes=8)" in warnings
