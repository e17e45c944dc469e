"""Loops of one's own: one hash for any number of workers, launcher, kill and resume; DDP has several."""

import difflib
import json
import os
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
LOOPS, FAULTY = ROOT / "examples" / "loops", Path(__file__).parent / "faulty_loop.py"
NAMES = ("classifier", "unet", "dcgan")
pytestmark = pytest.mark.gloo


def run(folder, *command, code=0, **variables):
    """What a script prints, in a folder of its own; forked, unless torchrun starts it."""
    folder.mkdir(exist_ok=True)
    words = [sys.executable, *map(str, command)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    if "torch.distributed.run" in words:
        done = subprocess.run(
            words, cwd=folder, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    else:
        done = forked.call(words, environ, folder, launches="launch" in words)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def last(text):
    return text.strip().splitlines()[-1]


def torchrun(workers):
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", workers)


def launch(workers, *flags):
    return ("-m", "lockstep", "launch", "--workers", workers, *flags)


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    """The hash of a script by one worker, with so many epochs."""
    known = {}

    def find(name, epochs=2):
        if (name, epochs) not in known:
            folder = tmp_path_factory.mktemp(name)
            known[name, epochs] = last(run(folder, FAULTY, LOOPS / f"{name}.py", epochs))
        return known[name, epochs]

    return find


@pytest.mark.parametrize("name", NAMES)
def test_ten_lines_are_enough(name):
    plain, ours = ((LOOPS / f"{name}{end}.py").read_text().splitlines() for end in ("_plain", ""))
    pairs = difflib.ndiff([line.strip() for line in plain], [line.strip() for line in ours])
    added = [line for line in pairs if line.startswith("+ ") and line[2:].strip() and '"""' not in line]
    assert len(added) <= 10, added


CASES = {"classifier": [torchrun(2), launch(3)], "unet": [launch(2), launch(4)], "dcgan": [launch(3)]}


@pytest.mark.parametrize("name", NAMES)
def test_one_hash_for_any_number_of_workers(name, alone, tmp_path):
    for number, start in enumerate(CASES[name]):
        assert last(run(tmp_path / str(number), *start, LOOPS / f"{name}.py")) == alone(name), start


def test_ddp_has_a_hash_for_each_number_of_workers(tmp_path):
    starts = ((), torchrun(2), torchrun(4))
    found = {last(run(tmp_path, *start, LOOPS / "classifier_plain.py")) for start in starts}
    assert len(found) == 3


@pytest.mark.parametrize("name", ["unet"])
def test_a_script_goes_on_in_the_middle_of_an_epoch(name, alone, tmp_path):
    """Two workers are killed, and nobody takes their place; then three go on."""
    fault = json.dumps([["before the backward pass", 13, rank] for rank in (0, 1)])
    command = (FAULTY, LOOPS / f"{name}.py", 3)
    run(tmp_path, *launch(2, "--restarts", 0), *command, code=1, FAULTS=fault, FOLDER=str(tmp_path))
    assert (tmp_path / f"{name}.safetensors").exists()
    output = run(tmp_path, *launch(3), *command)
    assert "epoch 0" not in output and last(output) == alone(name, 3)


@pytest.mark.parametrize("name", ["classifier", "dcgan"])
def test_killed_workers_cost_no_bit(name, alone, tmp_path):
    points = ("before the backward pass", "before the sum", "after the sum", "before the update")
    points += ("after the update", "between batches", "before the file", "after the file")
    points += ("after the backward pass", "before they agree", "after the state is sent")
    faults = [[point, number + 2, number % 2] for number, point in enumerate(points)]
    faults += [["before the file", 6, 0], ["after the file", 12, 0]]
    command = (*launch(3, "--restarts", 30), FAULTY, LOOPS / f"{name}.py", 3)
    output = run(tmp_path, *command, FAULTS=json.dumps(faults), FOLDER=str(tmp_path))
    assert len(list(tmp_path.glob("*-*"))) >= 4  # of the faults; some need a worker that was not there
    assert last(output) == alone(name, 3)
