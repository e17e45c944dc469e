"""The promise: the same weights at any number of workers, by any launcher, backend, bucket size and overlap.

Beside it stands the control: plain DistributedDataParallel gives other bits at each number of workers.
"""

import os
import sys
from pathlib import Path

import forked
import pytest
import torch
from small import call, small_run, summary, train_command
from world import has_mpi, launched

import lockstep
from lockstep.spec.world import World
from lockstep.train.preflight import explain_crowding

# Augmentation, averaged weights, clipping for all; googlenet has dropout, resnet18 and googlenet batch norm.
EVERYTHING = ("train.lanes=8", "train.epochs=1", "data.augment=flip,crop", "train.ema=0.9", "train.clip=1.0")
SMALL = ("train.batch=16", "data.num_train=40", "data.num_test=21")
MODELS = {
    "lenet5": EVERYTHING,
    "resnet18": (*EVERYTHING, *SMALL, "model.name=resnet18", "train.channels_last=true"),
    "googlenet": (*EVERYTHING, *SMALL, "model.name=googlenet"),
}
HASHES = ("weights_sha256", "optimizer_sha256", "ema_sha256", "loss", "accuracy", "identity")
# Covers every value of every column; benchmarks/matrix.py runs them all. Under torchrun and mpirun a worker
# imports torch for itself, which is most of what a row takes, so our launcher has the rows of many workers.
COVERING = [
    # model, launcher, workers, backend, bucket MB, overlap, wire
    ("lenet5", "lockstep", 2, "auto", 25, True, "fp32"),
    ("lenet5", "lockstep", 3, "gloo", 0.1, False, "fp32"),
    ("lenet5", "lockstep", 4, "gloo", 1, True, "fp32"),
    ("lenet5", "lockstep", 5, "gloo", 0.1, False, "bf16"),
    ("lenet5", "lockstep", 7, "gloo", 0.01, True, "fp32"),
    ("lenet5", "lockstep", 8, "gloo", 25, True, "fp32"),
    ("lenet5", "torchrun", 3, "gloo", 0.01, True, "bf16"),
    ("lenet5", "openmpi", 3, "mpi", 0.01, False, "fp32"),
    ("lenet5", "openmpi", 2, "gloo", 1, True, "bf16"),
    ("lenet5", "mpich", 4, "gloo", 25, True, "bf16"),
    ("resnet18", "lockstep", 3, "gloo", 1, True, "fp32"),
    ("resnet18", "mpich", 2, "mpi", 25, True, "fp32"),
    ("googlenet", "lockstep", 3, "gloo", 1, True, "bf16"),
]


def run_of(model, wire):
    return MODELS[model] if wire == "fp32" else (*MODELS[model], f"train.wire={wire}")


def hashes(directory):
    found = summary(directory)
    return {key: found.get(key) for key in HASHES}


@pytest.fixture
def reference(by_one_worker):
    """The hashes of a run by one worker."""

    def find(overrides):
        found = by_one_worker(*overrides)
        return {key: found.get(key) for key in HASHES}

    return find


@pytest.mark.gloo
@pytest.mark.mpi
@pytest.mark.parametrize("row", COVERING, ids=lambda row: "-".join(map(str, row)))
def test_any_workers_launcher_backend_bucket_overlap_and_wire(row, reference, tmp_path):
    model, launcher, workers, backend, bucket, overlap, wire = row
    if launcher in ("openmpi", "mpich") and not has_mpi(launcher):
        pytest.skip(f"{launcher} is not installed beside this Python")
    overrides = run_of(model, wire)
    flags = ["--backend", backend, "--bucket-mb", str(bucket), *([] if overlap else ["--no-overlap"])]
    command, env = launched(launcher, workers, train_command(tmp_path, *flags, overrides=overrides))
    if launcher in ("lockstep", "torchrun") and backend != "auto":  # one row of ours from nothing is enough
        done = forked.call(command, env=env, launches=launcher == "lockstep")
    else:
        done = call(command, env=env)
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path / "run")["workers"] == workers
    assert hashes(tmp_path / "run") == reference(overrides)


@pytest.mark.gloo
def test_the_wire_precision_is_part_of_the_run(reference):
    fp32, bf16 = (reference(run_of("lenet5", wire)) for wire in ("fp32", "bf16"))
    assert fp32["weights_sha256"] != bf16["weights_sha256"] and fp32["identity"] != bf16["identity"]


@pytest.mark.gloo
def test_the_control_gives_other_bits_at_every_number_of_workers():
    done = call([sys.executable, str(Path(__file__).with_name("control.py")), "1", "2", "4"])
    assert done.returncode == 0, done.stderr
    found = dict(line.split() for line in done.stdout.splitlines())
    assert found.keys() == {"1", "2", "4"}
    assert len(set(found.values())) == 3, (
        "stock training gave equal bits, so the test above could pass without Lockstep"
    )


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_workers_that_mpirun_has_bound_to_cores_of_their_own_are_no_crowd():
    cpu, cores = torch.device("cpu"), os.sched_getaffinity(0)

    def warnings(launcher, workers):
        world = World(launcher, rank=0, size=workers, local_size=workers)
        return explain_crowding(lockstep.Launch(world=world), small_run(), cpu)

    os.sched_setaffinity(0, {min(cores)})
    try:
        assert not warnings("mpirun", 2)
        assert "workers with 1 thread each on" in warnings("mpirun", 1 + os.cpu_count())[0]
        assert "2 workers with 1 thread each on 1 core get in" in warnings("torchrun", 2)[0]
    finally:
        os.sched_setaffinity(0, cores)
