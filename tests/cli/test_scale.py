"""`lockstep scale`: real trainings of a few steps, with the same bits; what cannot be is refused before."""

import json
import sys
from argparse import Namespace

import forked
import pytest

from lockstep import Run, Train
from lockstep.cli.foresight.scale import _fit

COMMAND = [sys.executable, "-W", "error", "-m", "lockstep", "scale", "shapes"]
SMALL = ["-o", "data.num_train=2048", "-o", "train.batch=32", "-o", "train.lanes=4", "--device", "cpu"]

SHORT = ["-o", "train.epochs=1", "-o", "data.num_train=64", "-o", "data.num_test=8"]


@pytest.mark.gloo
def test_two_workers_have_the_bits_of_one(tmp_path):
    done = forked.call([*COMMAND, *SMALL, "--workers", "1,2", "--steps", "8", "--json"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    records = json.loads(done.stdout)
    one, two = (record["details"] for record in records)
    assert (one["workers"], two["workers"], one["batch"], one["speedup"]) == (1, 2, 32, 1.0)
    assert one["weights_sha256"] == two["weights_sha256"] and len(one["weights_sha256"]) == 64
    for record in records:
        assert record["n"] == 4 and record["spread"][0] <= record["value"] <= record["spread"][1]
        assert record["details"]["img_s"] == pytest.approx(32 / record["value"])
    assert not list(tmp_path.iterdir())


def test_weak_scaling_grows_batch_and_lanes():
    options = Namespace(weak=True, workers="2,4,8", steps=24)
    fitted = [_fit(Run(train=Train(batch=32, lanes=4)), count, 2, options) for count in (2, 4, 8)]
    assert [(run.train.batch, run.train.lanes) for run in fitted] == [(32, 4), (64, 8), (128, 16)]
    assert {run.checkpoint.every_steps for run in fitted} == {24}


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
