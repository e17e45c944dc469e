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
from lockstep.comm.exchange import SharedExchange
from lockstep.lower.lane_by_lane import LaneByLane
from lockstep.train.audit import Audit

world, metrics, audited = read_world(os.environ), Path("run/metrics.jsonl"), []
gradients, exchange, begin = LaneByLane._gradients, SharedExchange.run, Audit.begin
def is_faulty():
    return world and world.name == "1"
def wrong_lane(self, losses, early):
    grads = gradients(self, losses, None)
    if is_faulty() and metrics.is_file() and len(metrics.read_text().splitlines()) > 5:
        grads[2].view(-1)[3] += 1e-6
    return grads
def note_slice(self, step, reducer):
    begin(self, step, reducer)
    audited[:] = [step > 3 and reducer._watched.watched == 1]
def wrong_slice(self):
    own = SharedExchange._sum
    def wrong(self, rows, output):
        own(self, rows, output)
        output[0] = output[0] * (1 + 1e-6) + 1e-6
    if is_faulty() and audited[0]:  # by chance one of three, by then
        SharedExchange._sum = wrong
    try:
        exchange(self)
    finally:
        SharedExchange._sum = own
{fault}
run = from_table(merge(to_table(lockstep.recipe("shapes")), parse_overrides({keys})))
launch = lockstep.Launch(
    name="run", runs_dir=Path(), device="cpu", workers={workers}, audit=1, overlap=False, bucket_mb=0.1
)
lockstep.train(run, launch=launch)
"""
LANE = (
    "LaneByLane._gradients = wrong_lane",
    r"step (\d+): lane \d gave other bits on worker (\d) on \S+ than on worker (\d) on \S+, first in "
    r"the gradient of 'blocks\S+': the memory or processor of one of them is faulty",
)
SLICE = (
    "SharedExchange.run, Audit.begin = wrong_slice, note_slice",
    r"step (\d+): worker (1) on \S+ summed other bits of a slice of the gradients than worker (2) on \S+ "
    r"finds from the same parts: the memory or processor of one of them is faulty",
)


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
@pytest.mark.parametrize(("fault", "workers"), [(LANE, 2), (SLICE, 3)], ids=["lane", "slice"])
def test_a_wrong_bit_stops_the_run_before_the_commit_and_names_both(fault, workers, tmp_path):
    """In a slice it reaches all workers alike."""
    path, (code, pattern) = tmp_path / "faulty.py", fault
    path.write_text(FAULTY.format(keys=[*OVERRIDES, *KEYS], fault=code, workers=workers))
    done = forked.call([sys.executable, str(path)], cwd=tmp_path, launches=True)
    assert done.returncode == 1, done.stderr
    found = re.search(pattern, done.stderr)
    assert found and "1" in (found[2], found[3]) and found[2] != found[3], done.stderr
    assert len(rows(tmp_path / "run", "step")) == int(found[1]), "the step was not taken"
    again = forked.call(train_command(tmp_path, "--resume", "auto", overrides=KEYS))
    assert again.returncode == 0, again.stderr
    plain, _ = train(small_run(*KEYS), tmp_path / "plain")
    assert summary(tmp_path / "run")["weights_sha256"] == plain.summary["weights_sha256"]
