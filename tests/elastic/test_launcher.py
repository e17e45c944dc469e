"""Our launcher with real processes: signals, failures, what is shown, and that nothing is left running."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from small import OVERRIDES, call, rows, summary, train_command
from world import has_mpi, launched

pytestmark = pytest.mark.gloo
LONG = ("train.epochs=400", "data.num_test=10")  # far longer than any test


@contextmanager
def started(runs_dir, *arguments, overrides=LONG):
    """A training run of its own, which ends with the test."""
    command = train_command(runs_dir, *arguments, overrides=overrides)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_steps(directory, count, process):
    deadline = time.monotonic() + 40
    while not (directory / "metrics.jsonl").is_file() or len(rows(directory, "step")) < count:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "no steps"
        time.sleep(0.05)


def workers_of(launcher):
    """The processes that a launcher has started, by rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == launcher:
                text = (folder / "environ").read_text()
                found[int(text.partition('"rank": ')[2].partition(",")[0])] = int(folder.name)
        except (OSError, ValueError):
            continue
    return found


def assert_gone(pids):
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, f"left running: {pids}"
        time.sleep(0.05)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_other_workers_go_on_to_the_same_bits(number, code, tmp_path):
    with started(tmp_path, "--workers", "3", overrides=()) as process:
        wait_for_steps(tmp_path / "run", 2, process)
        workers = workers_of(process.pid)
        assert set(workers) == {0, 1, 2}
        process.send_signal(number)
        _, errors = process.communicate(timeout=40)
    assert process.returncode == code, errors
    assert f"stopped by {number.name} after step" in errors and errors.count("lockstep:") == 1
    assert_gone(workers.values())
    if number == signal.SIGINT:
        return  # the rest is the same
    again = call([*train_command(tmp_path), "--resume", "auto", "--workers", "2"])
    assert again.returncode == 0, again.stderr
    alone = call(train_command(tmp_path / "alone"))
    assert alone.returncode == 0, alone.stderr
    for key in ("weights_sha256", "optimizer_sha256", "loss"):
        assert summary(tmp_path / "run")[key] == summary(tmp_path / "alone" / "run")[key]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_worker_ends_the_run_with_one_line(rank, tmp_path):
    with started(tmp_path, "--workers", "3") as process:
        wait_for_steps(tmp_path / "run", 2, process)
        workers = workers_of(process.pid)
        os.kill(workers[rank], signal.SIGKILL)
        _, errors = process.communicate(timeout=40)
    assert process.returncode == 1
    expected = f"lockstep: worker {rank} was ended by SIGKILL; --resume auto goes on"
    assert errors.strip().splitlines() == [expected]
    assert_gone(workers.values())


def test_the_death_of_the_launcher_leaves_no_worker(tmp_path):
    with started(tmp_path, "--workers", "3") as process:
        wait_for_steps(tmp_path / "run", 1, process)
        workers = workers_of(process.pid)
        process.kill()
    assert_gone(workers.values())


SCRIPT = """
import os, lockstep
from lockstep.spec.file import from_table, merge, parse_overrides, to_table
from lockstep.spec.world import read_world
run = from_table(merge(to_table(lockstep.recipe("shapes")), parse_overrides({overrides})))
world = read_world(os.environ)
rank = world.rank if world else 0
launch = lockstep.Launch({launch}name="run", device="cpu")
{before}
result = lockstep.train(run, launch=launch, on_event=lambda event: None)
print("finished", result.summary["workers"], result.summary["weights_sha256"])
"""


def script(folder, before="", launch="workers=3, ", overrides=OVERRIDES):
    path = folder / "my_script.py"
    path.write_text(SCRIPT.format(before=before, launch=launch, overrides=list(overrides)))
    return path


def test_a_script_of_the_user_prints_once_and_trains_to_the_same_bits(tmp_path):
    done = call([sys.executable, "-W", "error", str(script(tmp_path))], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    expected = call(train_command(tmp_path / "alone"))
    assert expected.returncode == 0
    assert done.stdout.split() == ["finished", "3", summary(tmp_path / "alone" / "run")["weights_sha256"]]


def test_the_same_script_under_torchrun(tmp_path):
    path = script(tmp_path, launch="")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(path)]
    done = call(run, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:2] == ["finished", "2"] and len(set(done.stdout.split("\n"))) == 2


def test_a_worker_that_raises_is_shown_with_its_rank(tmp_path):
    path = script(tmp_path, 'if rank == 2: raise ValueError("broken here")')
    done = call([sys.executable, str(path)], cwd=tmp_path)
    assert done.returncode == 1
    assert "[worker 2] ValueError: broken here" in done.stderr
    assert not [line for line in done.stderr.splitlines() if not line.startswith("[worker 2]")]


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (
            "import dataclasses\nrun = dataclasses.replace(run, seed=rank // 2)",
            "worker 2 on .* has seed=1, worker 0 on .* has 0",
        ),
        (
            "import torch\nif rank == 1: torch.__version__ = '2.99.0'",
            "worker 1 on .* has numerics.torch=2.99.0",
        ),
        (
            "if rank == 1: run = lockstep.Run(data=lockstep.Data('mnist', dir='nowhere'))",
            "worker 1 on .*: .*nowhere",
        ),
    ],
    ids=["seed", "torch", "data missing"],
)
def test_workers_that_would_differ_are_refused_by_name(before, message, tmp_path):
    done = call([sys.executable, str(script(tmp_path, before))], cwd=tmp_path)
    assert done.returncode in (1, 2), done.stderr
    assert re.search(message, done.stderr), done.stderr
    assert not (tmp_path / "runs").exists(), "a directory was made before the workers agreed"


def test_another_content_of_the_data_is_refused(tmp_path):
    before = (
        "import torch\n"
        "images = torch.arange(64 * 256).remainder(251).to(torch.uint8).view(64, 1, 16, 16)\n"
        "if rank == 1: images = images + 1\n"
        "data = [(image.float() / 255, int(n % 4)) for n, image in enumerate(images)]\n"
        "import functools; lockstep.train = functools.partial(lockstep.train, data=(data, data))"
    )
    done = call([sys.executable, str(script(tmp_path, before))], cwd=tmp_path)
    assert done.returncode in (1, 2), done.stderr
    assert "worker 1 on" in done.stderr and "manifest." in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "0"], "--workers 0 must be a whole number from 1"),
        (["--workers", "-3"], "--workers -3 must be a whole number from 1"),
        (["--workers", "many"], "--workers many must be a whole number from 1, or auto"),
        (["--workers", "5"], "5 workers are more than train.lanes=4"),
        (["--workers", "2", "--backend", "mpi"], "--backend mpi needs mpirun"),
        (["--workers", "2", "--bucket-mb", "0"], "--bucket-mb 0 must be above 0"),
        (["--workers", "2", "--bucket-mb", "nan"], "--bucket-mb nan must be above 0"),
    ],
)
def test_bad_flags_are_refused_before_any_worker_starts(arguments, message, tmp_path):
    done = call(train_command(tmp_path, *arguments))
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_code_without_a_file_cannot_be_started_again(tmp_path):
    code = "import lockstep; lockstep.train(lockstep.recipe('shapes'), launch=lockstep.Launch(workers=2))"
    done = call([sys.executable, "-c", code], cwd=tmp_path)
    assert "save the code in a file" in done.stderr


def test_auto_is_one_worker_a_core_and_at_most_the_lanes(tmp_path):
    done = call(train_command(tmp_path, "--workers", "auto", overrides=("train.epochs=1", "train.lanes=2")))
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path / "run")["workers"] == min(2, len(os.sched_getaffinity(0)))


@pytest.mark.mpi
@pytest.mark.skipif(not has_mpi("mpich"), reason="MPICH is not installed beside this Python")
def test_a_worker_that_raises_under_mpi_is_heard_and_ends_the_job(tmp_path):
    before = (
        "import torch\n"
        "class Broken(torch.nn.Linear):\n"
        "    seen = 0\n"
        "    def forward(self, x):\n"
        "        self.seen += 1\n"
        '        if rank == 1 and self.seen > 9: raise ValueError("broken here")\n'
        "        return super().forward(x.flatten(1))\n"
        "import functools; lockstep.train = functools.partial(lockstep.train, model=Broken(256, 10))"
    )
    path = script(tmp_path, before, launch='backend="mpi", ')
    command, env = launched("mpich", 2, [sys.executable, str(path)])
    done = call(command, env=env, cwd=tmp_path)
    assert done.returncode != 0 and "ValueError: broken here" in done.stderr
