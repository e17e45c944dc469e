"""`lockstep scale`: real trainings of a few steps, with the same bits; what cannot be is refused before."""

import json
import sys

import forked
import pytest

COMMAND = [sys.executable, "-W", "error", "-m", "lockstep", "scale", "shapes"]
SMALL = ["-o", "data.num_train=2048", "-o", "train.batch=32", "-o", "train.lanes=4", "--device", "cpu"]

SHORT = ["-o", "train.epochs=1", "-o", "data.num_train=64", "-o", "data.num_test=8"]


@pytest.mark.gloo
def test_two_workers_have_the_bits_of_one(tmp_path):
    done = forked.call([*COMMAND, *SMALL, "--workers", "1,2", "--steps", "8", "--json"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    one, two = json.loads(done.stdout)
    assert (one["workers"], two["workers"], one["batch"], one["n"]) == (1, 2, 32, 4)
    assert one["weights_sha256"] == two["weights_sha256"] and len(one["weights_sha256"]) == 64
    for row in (one, two):
        assert row["spread_s"][0] <= row["step_s"] <= row["spread_s"][1]
        assert row["img_s"] == pytest.approx(32 / row["step_s"])
    assert not list(tmp_path.iterdir())


def test_weak_scaling_grows_batch_and_lanes(tmp_path):
    words = ["--workers", "2", "--steps", "5", "--weak"]
    done = forked.call([*COMMAND, *SMALL, *words], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    header, row, *_ = done.stdout.splitlines()
    assert header.split()[:3] == ["workers", "batch", "step"] and row.split()[:2] == ["2", "32"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--workers", "1,8"], "--workers 8: train.lanes=4 is the most"),
        (["--workers", "2,1"], "--workers 2,1 must rise"),
        (["--workers", "two"], "--workers two must be numbers with commas"),
        (["--workers", "2,3", "--weak"], "3 is not 2 times a power of two"),
        (["--steps", "4"], "--steps 4 must be above 4"),
        (["--workers", "1", *SHORT], "the run has fewer than 24 steps"),
        (["--workers", "1", "-o", "model.name=none"], "--workers 1: unknown model 'none'"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(tmp_path, words, says):
    done = forked.call([*COMMAND, *SMALL, *words], cwd=tmp_path)
    assert done.returncode == 2 and says in done.stderr.splitlines()[-1], done.stderr
