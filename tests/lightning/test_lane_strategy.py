"""Lightning with lanes: one hash and one log for any number of workers; what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S

pytest.importorskip("lightning")
ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent
EXAMPLE = ROOT / "examples" / "lightning_classifier.py"
pytestmark = [pytest.mark.gloo, pytest.mark.timeout(600)]  # many processes, on two cores
WORKERS = 1, 2, 4
REFUSED = {
    "manual": ("ModelError", "automatic_optimization"),
    "sync_batchnorm": ("ModelError", "sync_batchnorm"),
    "SyncBatchNorm": ("ModelError", "use BatchNorm"),
    "before_transfer": ("ModelError", "on_after_batch_transfer"),
    "LBFGS": ("ModelError", "LBFGS"),
    "no_loss": ("LockstepError", "no loss"),
    "not_finite": ("NumericsError", "layer.weight is not finite"),
    "iterable": ("DataError", "IterableDataset"),
    "batch": ("SpecError", "batch=6 must be a multiple of lanes=4"),
    "batch_sampler": ("DataError", "batch_sampler"),
    "distributed": ("DataError", "DistributedSampler"),
    "generator": ("DataError", "leave `generator` out"),
    "no_loader": ("DataError", "DataLoader"),
    "two_loaders": ("DataError", "one train loader"),
    "lanes": ("SpecError", "power of two"),
    "ddp_option": ("SpecError", "find_unused_parameters"),
    "workers": ("SpecError", "3 workers are more than lanes=2"),
    "other_lanes": ("IdentityError", "lanes=4"),
    "other_batch": ("IdentityError", "batch_size=4"),
}


def run(folder, *words):
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with what 1, 2 and 4 workers found; each resumes from a file of those before."""
    folder, resumed, jobs = tmp_path_factory.mktemp("fits"), [], []
    for workers in WORKERS:
        jobs.append([workers, str(HERE / "fits.py"), workers, str(folder / str(workers)), *resumed])
        resumed = [str(folder / str(workers) / "plain" / "step=3.ckpt")]
    jobs += [[1, str(HERE / "refusals.py"), str(folder / "refused.json")], [1, str(EXAMPLE)]]
    (folder / "printed").write_text(run(folder, HERE / "forks.py", json.dumps(jobs)))
    return folder


@pytest.fixture(scope="module")
def found(folder):
    return {workers: json.loads((folder / str(workers) / "found.json").read_text()) for workers in WORKERS}


def test_lightning_launches_its_workers_itself(folder, tmp_path):
    """The example, by processes that Lightning starts; and by one."""
    alone = (folder / "printed").read_text().strip().splitlines()[-1]
    assert len(alone) == 64 and run(tmp_path, EXAMPLE, "--workers", 2).strip().splitlines()[-1] == alone


@pytest.mark.parametrize("fit", ["plain", "hard"])
def test_any_number_of_workers_ends_with_one_hash_and_one_log(found, fit):
    """Hash, logged values, what hooks draw and see, and what validation decides."""
    for workers in WORKERS:
        assert found[workers][fit] == found[1][fit], workers
    assert len(found[1][fit]["metrics"]) and found[1]["plain"]["steps"] == 10


def test_every_sample_is_evaluated_once(found):
    assert found[4]["plain"]["tested"][0]["val_count"] == 10.0
    assert ",7.0,9.0," in found[4]["plain"]["metrics"][0]  # two validation loaders, one of batches of one


def test_a_checkpoint_in_the_middle_of_an_epoch_goes_on_with_other_workers(found):
    for workers in WORKERS:
        assert found[workers]["resumed"]["hash"] == found[1]["plain"]["hash"], workers
        assert found[workers]["resumed"]["seen"] == found[1]["plain"]["seen"][6:]


def test_ddp_has_a_hash_for_each_number_of_workers(found):
    assert found[1]["ddp"] != found[2]["ddp"]


def test_what_cannot_give_the_same_bits_is_refused(folder):
    told = json.loads((folder / "refused.json").read_text())
    assert set(told) == set(REFUSED)
    for name, (kind, text) in REFUSED.items():
        assert told[name][0] == kind and text in told[name][1], (name, told[name])
        assert "\n" not in told[name][1]
