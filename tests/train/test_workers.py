"""The promise: the same weights at any number of workers, by any launcher, backend, bucket size and overlap."""

import itertools
import json
import subprocess

import pytest
from small import call, summary, train_command
from world import MPI, has_mpi, launched

# Batch norm, dropout, augmentation, averaged weights and clipping, all at once.
EVERYTHING = (
    "train.lanes=8",
    "train.epochs=1",
    "data.augment=flip,crop",
    "train.ema=0.9",
    "train.clip=1.0",
    "data.num_train=100",
    "data.num_test=45",
)
MODELS = {
    "lenet5": (*EVERYTHING, "train.batch=32"),
    "resnet18": (*EVERYTHING, "model.name=resnet18", "train.batch=32"),
    "googlenet": (*EVERYTHING, "model.name=googlenet", "data.size=32", "train.batch=32", "data.num_train=40"),
}
HASHES = ("weights_sha256", "optimizer_sha256", "ema_sha256", "loss", "accuracy")


def hashes(directory):
    found = summary(directory)
    return {key: found[key] for key in HASHES if key in found}


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """The hashes of a run by one worker, computed once for each Run."""
    known = {}

    def find(*overrides):
        if overrides not in known:
            folder = tmp_path_factory.mktemp("alone")
            done = call(train_command(folder, overrides=overrides))
            assert done.returncode == 0, done.stderr
            known[overrides] = hashes(folder / "run")
        return known[overrides]

    return find


def check(tmp_path, expected, launcher, workers, *flags, overrides=()):
    command, env = launched(launcher, workers, train_command(tmp_path, *flags, overrides=overrides))
    done = call(command, env=env)
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path / "run")["workers"] == workers
    assert hashes(tmp_path / "run") == expected


@pytest.mark.gloo
@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_any_number_of_workers(workers, reference, tmp_path):
    check(tmp_path, reference(*EVERYTHING), "lockstep", workers, overrides=EVERYTHING)
