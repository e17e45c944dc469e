"""Compressed training: the same bits by any number of workers, resumed by others, and after a loss."""

import re
import signal

import pytest
from forked import call
from job import Job, assert_no_step_lost
from small import small_run, summary, train, train_command

import lockstep
from lockstep.errors import SpecError

RUN = ("train.lanes=8", "train.ema=0.9", "train.clip=1.0", "checkpoint.every_steps=4")
HASHES = ("weights_sha256", "optimizer_sha256", "ema_sha256", "feedback_sha256", "loss", "identity")
KINDS = {"int8": (2, 3), "top:0.05": (4, 8), "rank:2": (3, 5), "fp8": (8,), "bf16": (2,)}


def hashes(found):
    return {key: found[key] for key in HASHES}


@pytest.mark.gloo
@pytest.mark.parametrize(("kind", "workers"), [(k, w) for k, counts in KINDS.items() for w in counts])
def test_any_number_of_workers(kind, workers, by_one_worker, tmp_path):
    overrides = (*RUN, f"train.compress={kind}", "train.compress_after=1")
    flags = ["--workers", str(workers), "--bucket-mb", "0.05"]
    done = call(train_command(tmp_path, *flags, overrides=overrides), launches=True)
    assert done.returncode == 0, done.stderr
    assert hashes(summary(tmp_path / "run")) == hashes(by_one_worker(*overrides))
    assert summary(tmp_path / "run")["sent_mb_step"] > 0


def test_compression_is_part_of_the_run_and_none_is_what_it_was(by_one_worker):
    found = {kind: by_one_worker(*RUN, f"train.compress={kind}") for kind in ("none", "int8", "bf16")}
    assert len({each["weights_sha256"] for each in found.values()}) == 3
    assert found["none"]["identity"] == by_one_worker(*RUN)["identity"]
    assert "feedback_sha256" not in found["none"]


@pytest.mark.gloo
@pytest.mark.parametrize("kind", ["top:0.05", "rank:2"])
def test_resumed_by_another_number_of_workers(kind, by_one_worker, tmp_path):
    overrides = (*RUN, f"train.compress={kind}")
    with Job(tmp_path, "--workers", "2", overrides=overrides, paced=True) as job:
        job.wait_for_steps(5)
        job.process.send_signal(signal.SIGTERM)
        job.hurry()
        job.finish(143)
    done = call(
        train_command(tmp_path, "--workers", "3", "--resume", "auto", overrides=overrides), launches=True
    )
    assert done.returncode == 0, done.stderr
    assert_no_step_lost(tmp_path / "run")
    assert hashes(summary(tmp_path / "run")) == hashes(by_one_worker(*overrides))


@pytest.mark.gloo
def test_without_copies_a_lost_worker_costs_the_steps_since_the_checkpoint(by_one_worker, tmp_path):
    overrides = (*RUN, "train.compress=top:0.05")
    with Job(tmp_path, "--workers", "3", "--copy-every", "0", overrides=overrides, paced=True) as job:
        job.wait_for((job.run / "checkpoints" / "step-000000004.json").exists, "the checkpoint of step 4")
        job.wait_for_workers("1")
        job.kill("1")
        job.wait_for(job.generations, "the next generation")
        job.hurry()
        output, _ = job.finish()
    found = re.search(
        r"is lost, and all (?:go back \d+ steps? to|go on from) the checkpoint of step (\d+)", output
    )
    assert found and int(found[1]) >= 4, output
    assert_no_step_lost(tmp_path / "run")
    assert hashes(summary(tmp_path / "run")) == hashes(by_one_worker(*overrides))


def test_bad_input_is_one_line(tmp_path):
    with pytest.raises(SpecError, match=r"train.wire=bf16 does not go with train.compress=int8"):
        small_run("train.compress=int8", "train.wire=bf16")
    with pytest.raises(SpecError, match=r"train\.compress_after=2 needs train\.compress"):
        small_run("train.compress_after=2")
    run = small_run("train.compress=int8")
    for plan in ("pipeline=2", "data=2,shard=optimizer"):
        with pytest.raises(SpecError, match=r"not with train\.compress=int8, which needs all of a lane"):
            lockstep.Launch(plan=plan, workers=2).check_run(run)
    assert train(run, tmp_path)[0].summary["feedback_sha256"]
