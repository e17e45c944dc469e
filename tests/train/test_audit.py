"""The audit: no bit changes by it, and one wrong bit is found before the step is committed."""

import re
import sys

import forked
import pytest
from job import Job
from small import OVERRIDES, rows, small_run, summary, train, train_command

KEYS = ("train.epochs=1", "data.augment=flip")
FAULTY = """
import os, lockstep
from pathlib import Path
from lockstep.spec.run_file import from_table, merge, parse_overrides, to_table
from lockstep.spec.world import read_world
from lockstep.lower.lane_by_lane import LaneByLane

world, gradients, metrics = read_world(os.environ), LaneByLane._gradients, Path("run/metrics.jsonl")
def corrupted(self, losses, early):
    grads = gradients(self, losses, None)
    if world and world.name == "1" and metrics.is_file() and len(metrics.read_text().splitlines()) > 5:
        grads[2].view(-1)[3] += 1e-6
    return grads
LaneByLane._gradients = corrupted
run = from_table(merge(to_table(lockstep.recipe("shapes")), parse_overrides({keys})))
launch = lockstep.Launch(name="run", runs_dir=Path(), device="cpu", workers=2, audit=1, overlap=False)
lockstep.train(run, launch=launch)
"""


@pytest.mark.parametrize("overrides", [(), ("model.name=googlenet", "data.num_train=40")])
def test_alone_it_changes_nothing(overrides, tmp_path):
    keys = (*KEYS, "train.batch=16", *overrides)
    audited, _ = train(small_run(*keys), tmp_path, launch={"audit": 2})
    plain, _ = train(small_run(*keys), tmp_path)
    assert audited.summary["weights_sha256"] == plain.summary["weights_sha256"]


@pytest.mark.gloo
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_between_workers_it_changes_nothing(wire, tmp_path):
    keys = (*KEYS, f"train.wire={wire}")
    with Job(tmp_path, "--workers", "3", "--audit", "1", overrides=keys) as job:
        job.finish()
    plain, _ = train(small_run(*keys), tmp_path / "plain")
    assert summary(job.run)["weights_sha256"] == plain.summary["weights_sha256"]


@pytest.mark.gloo
def test_a_wrong_bit_stops_the_run_before_the_commit_and_names_both(tmp_path):
    path = tmp_path / "faulty.py"
    path.write_text(FAULTY.format(keys=[*OVERRIDES, *KEYS]))
    done = forked.call([sys.executable, str(path)], cwd=tmp_path, launches=True)
    assert done.returncode == 1, done.stderr
    pattern = (
        r"step (\d+): lane \d gave other bits on worker (\d) on \S+ than on worker (\d) on \S+, first in "
        r"the gradient of 'blocks\S+': the memory or processor of one of them is faulty"
    )
    found = re.search(pattern, done.stderr)
    assert found and {found[2], found[3]} == {"0", "1"}, done.stderr
    assert len(rows(tmp_path / "run", "step")) == int(found[1]), "the step was not taken"
    again = forked.call(train_command(tmp_path, "--resume", "auto", overrides=KEYS))
    assert again.returncode == 0, again.stderr
    plain, _ = train(small_run(*KEYS), tmp_path / "plain")
    assert summary(tmp_path / "run")["weights_sha256"] == plain.summary["weights_sha256"]
