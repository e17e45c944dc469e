"""Loops of one's own: one hash for any number of workers, launcher, kill and resume; DDP has several."""

import difflib
import json
import os
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import forked
import pytest
from patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
LOOPS, FAULTY = ROOT / "examples" / "loops", Path(__file__).parent / "faulty_loop.py"
NAMES = ("classifier", "unet", "dcgan")
pytestmark = [pytest.mark.gloo, pytest.mark.timeout(600)]  # many processes, on two cores


def run(folder, *command, code=0, **variables):
    """What a script prints, in a folder of its own; forked, but for workers that torchrun starts."""
    folder.mkdir(exist_ok=True)
    words = [sys.executable, *map(str, command)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    with forked.Forked(words, environ, folder, launches="launch" in words) as process:
        done = process.finish(3 * PATIENCE_S)  # several workers are killed and start again
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def run_as_torchrun(folder, workers, *command):
    """What worker 0 prints; forked, with the variables that torchrun sets."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common |= {"WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers}
    return run_all(folder, [{**common, "RANK": n, "LOCAL_RANK": n} for n in range(workers)], command)


def run_as_srun(folder, workers, *command):
    """The same with the variables of a Slurm step on one node."""
    common = {"SLURM_STEP_NUM_TASKS": workers, "SLURM_STEP_TASKS_PER_NODE": workers, "SLURM_NODEID": 0}
    common |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": os.getpid(), "SLURM_STEP_ID": 0}
    every = [{**common, "SLURM_PROCID": n, "SLURM_LOCALID": n} for n in range(workers)]
    return run_all(folder, every, command)


def run_all(folder, variables, command):
    """Fork a process for each of these variables; gives what the first prints."""
    folder.mkdir(exist_ok=True)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, *map(str, command)]
    with ExitStack() as stack:
        every = [{**environ, **{key: str(value) for key, value in own.items()}} for own in variables]
        started = [stack.enter_context(forked.Forked(words, own, folder)) for own in every]
        done = [process.finish() for process in started]
    assert not any(one.returncode for one in done), "".join(one.stderr for one in done)
    return done[0].stdout


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


@pytest.mark.parametrize("name", NAMES)
def test_one_hash_for_any_number_of_workers(name, alone, tmp_path):
    for workers in (2, 3, 4):
        assert last(run(tmp_path / f"{workers}", *launch(workers), LOOPS / f"{name}.py")) == alone(name)
        found = last(run_as_torchrun(tmp_path / f"as{workers}", workers, LOOPS / f"{name}.py"))
        assert found == alone(name), workers


def test_torchrun_itself_and_a_slurm_step_give_the_same_hash(alone, tmp_path):
    assert last(run(tmp_path, *torchrun(2), LOOPS / "classifier.py")) == alone("classifier")
    assert last(run_as_srun(tmp_path / "srun", 3, LOOPS / "unet.py")) == alone("unet")


@pytest.mark.parametrize("name", NAMES)
def test_ddp_has_a_hash_for_each_number_of_workers(name, tmp_path):
    plain = LOOPS / f"{name}_plain.py"
    found = [last(run(tmp_path, plain)), *(last(run_as_torchrun(tmp_path, w, plain)) for w in (2, 4))]
    assert len(set(found)) == 3


@pytest.mark.parametrize("name", NAMES)
def test_a_script_goes_on_in_the_middle_of_an_epoch(name, alone, tmp_path):
    """Two workers are killed, and nobody takes their place; then three go on."""
    fault = json.dumps([["before the backward pass", 13, rank] for rank in (0, 1)])
    command = (FAULTY, LOOPS / f"{name}.py", 3)
    run(tmp_path, *launch(2, "--restarts", 0), *command, code=1, FAULTS=fault, FOLDER=str(tmp_path))
    assert (tmp_path / f"{name}.safetensors").exists()
    output = run(tmp_path, *launch(3), *command)
    assert "epoch 0" not in output and last(output) == alone(name, 3)


@pytest.mark.parametrize("name", NAMES)
def test_killed_workers_cost_no_bit(name, alone, tmp_path):
    """Each script suffers a third of the faults: each costs seconds, in which a new worker comes."""
    points = ("before the backward pass", "before the sum", "after the sum", "before the update")
    points += ("after the update", "between batches", "before the file", "after the file")
    points += ("after the backward pass", "before they agree", "after the state is sent")
    # only worker 0 writes
    faults = [[point, n + 2, 0 if point.endswith("file") else n % 2] for n, point in enumerate(points)]
    faults += [["before the file", 6, 0], ["after the file", 12, 0]]
    faults += [["between batches", 5, 0], ["before the sum", 9, 0]]
    mine = faults[NAMES.index(name) :: len(NAMES)]
    command = (*launch(3, "--restarts", 30), FAULTY, LOOPS / f"{name}.py", 3)
    output = run(tmp_path, *command, FAULTS=json.dumps(mine), FOLDER=str(tmp_path))
    assert len(list(tmp_path.glob("*-*"))) >= 4, mine  # of five
    assert last(output) == alone(name, 3)


def test_who_joins_while_a_save_is_done_again_takes_part_in_it(alone, tmp_path):
    """A worker is killed right before the save, and the one that writes only when the new one is there."""
    faults = [["after the update", 2, 2], ["before the file, while one waits to join", 3, 0]]
    command = (*launch(3), FAULTY, LOOPS / "classifier.py", 3)
    output = run(tmp_path, *command, FAULTS=json.dumps(faults), FOLDER=str(tmp_path))
    assert len(list(tmp_path.glob("*-*"))) == 2
    assert last(output) == alone("classifier", 3)


def test_an_error_of_one_worker_ends_no_training_as_if_it_were_done(alone, tmp_path):
    command = (*launch(2), FAULTY, LOOPS / "classifier.py", 3)
    faults = json.dumps([["before the sum", 4, 1]])
    output = run(tmp_path, *command, FAULTS=faults, FOLDER=str(tmp_path), ERROR="as told")
    assert len(list(tmp_path.glob("*-*"))) == 1
    assert last(output) == alone("classifier", 3)
