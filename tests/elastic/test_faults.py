"""The table of faults: whatever happens to workers, the run ends with the bits of a calm one."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import forked
import pytest
from job import SCRIPTS, Job, assert_no_step_lost, faulty_job
from small import call, small_run, summary, train, train_command

pytestmark = pytest.mark.gloo
KEYS = ("train.epochs=4", "train.ema=0.9", "checkpoint.every_steps=4")


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """What a run of these keys reports when nothing happens to it."""
    known = {}

    def find(*keys):
        if keys not in known:
            known[keys], _ = train(small_run(*keys), tmp_path_factory.mktemp("calm"))
        return known[keys].summary

    return find


def assert_same(found, expected):
    for key in (
        "weights_sha256",
        "optimizer_sha256",
        "loss",
        "accuracy",
        "best_accuracy",
        "steps",
        "identity",
    ):
        assert found[key] == expected[key], key
    assert found.get("feedback_sha256") == expected.get("feedback_sha256")


# Where a worker dies: in which step of eight of an epoch, from 0; a checkpoint is due after the fourth.
POINTS = {
    "before the commit": 2,
    "within the commit": 2,
    "within the commit, after the averages": 2,
    "after the commit": 2,
    "before the row": 2,
    "after the row": 2,
    "before the checkpoint": 3,
    "after the checkpoint is begun": 3,
    "before the checkpoint's hash": 3,
    "between the checkpoint's files": 3,
    "before the pruning": 3,
    "after the checkpoint": 3,
    "before the evaluation": 7,
    "after the evaluation": 7,
    "before the epoch's row": 7,
    "after the epoch's row": 7,
    "in the recovery": 2,
    "in the recovery, after the roll call": 2,
    "in the recovery, before the step": 2,
    "a worker raises": 2,
    "at the end": 7,
}
COMPRESSED = (  # enough to lose what lanes remember, and its copies, before, within and after a commit
    "before the commit",
    "within the commit",
    "after the commit",
    "after the row",
    "after the checkpoint is begun",
    "after the evaluation",
    "in the recovery",
    "in the recovery, after the roll call",
)
ONLY_WORKER_0 = (  # the others save nothing
    "before the checkpoint's hash",
    "between the checkpoint's files",
    "before the pruning",
    "after the checkpoint",
)


@pytest.mark.parametrize(("rank", "compress"), [(0, "none"), (1, "none"), (0, "top:0.05")])
def test_a_death_at_every_point_of_a_step(rank, compress, reference, tmp_path):
    points = [point for point in POINTS if rank == 0 or point not in ONLY_WORKER_0]
    points = points if compress == "none" else list(COMPRESSED)
    faults = [(point, 8 * epoch + POINTS[point], rank) for epoch, point in enumerate(points)]
    recoveries = [step for point, step, _ in faults if "recovery" in point]
    faults += [("before the step", step, 2) for step in recoveries]  # another worker is lost first
    last = "before the picture" if rank else "after the summary"  # both are worker 0's
    faults.append((last, 8 * len(points) - 1, 0))
    keys = (f"train.epochs={len(points)}", "train.ema=0.9", "checkpoint.every_steps=4", "data.num_train=260")
    keys = (*keys, f"train.compress={compress}")
    marks = tmp_path / "marks"
    marks.mkdir()
    with faulty_job(tmp_path, keys, FAULTS=json.dumps(faults), FAULT_DIR=str(marks)) as job:
        job.finish()
    happened = {path.name for path in marks.iterdir()}
    assert not [fault for fault in faults if "-".join(map(str, fault)).replace(" ", "_") not in happened]
    assert_same(summary(job.run), reference(*keys))
    assert_no_step_lost(job.run)
    drawn, done = ((job.run / name).stat().st_mtime_ns for name in ("curves.png", "summary.json"))
    assert drawn >= done, "whoever is worker 0 in the end draws"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["marks", "run"]


PACED = ("train.epochs=10", "checkpoint.every_steps=40", "data.num_test=10")


def four_workers(job):
    """The workers, in order of age, once there are four."""
    found = job.wait_for(lambda: len(w := job.workers()) == 4 and w, "four workers")
    return sorted(found, key=int)


def test_kills_from_outside(reference, tmp_path):
    """While it starts; any worker; worker 0; two at once."""
    flags = ["--workers", "4", "--restarts", "100"]
    with Job(tmp_path, *flags, overrides=PACED, paced=True, draws=True) as job:
        job.wait_for_workers("0")
        job.kill("0")
        job.wait_for_steps(3)
        for places in ((2,), (0,), (1, 3)):
            names, before = four_workers(job), job.steps()
            job.kill(*(names[place] for place in places))
            job.wait_for_steps(before + 3)
        job.hurry()
        _, errors = job.finish()
    assert not errors
    assert_same(summary(job.run), reference(*PACED))
    assert_no_step_lost(job.run)
    told = summary(job.run)["generations"]
    assert str(told).count("was killed by SIGKILL") >= 2  # one that has not joined yet is no loss
    assert [row["step"] for row in told] == sorted(row["step"] for row in told)


def test_a_frozen_worker_and_a_kill_while_another_joins(reference, tmp_path):
    with Job(tmp_path, "--workers", "4", "--restarts", "100", overrides=PACED, paced=True) as job:
        job.wait_for_steps(3)
        frozen = four_workers(job)[0]
        pid = job.workers()[frozen]
        os.kill(pid, signal.SIGSTOP)
        job.wait_for(lambda: "frozen for 1 s" in str(job.generations()), "the frozen one to be noticed")
        with pytest.raises(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)  # it is gone: nothing wakes
        newest = four_workers(job)[-1]
        job.kill(newest)
        joiner = str(int(newest) + 1)
        job.kill(joiner, min(job.wait_for_workers(joiner), key=int))
        job.hurry()
        job.finish()
    assert_same(summary(job.run), reference(*PACED))
    assert_no_step_lost(job.run)


def test_who_joins_while_the_others_form_their_group_waits_for_them(reference, tmp_path):
    """Else one of them, who has formed it already, would wait in it for one who has left to be joined."""
    script, env = SCRIPTS / "slow_to_form.py", {"JOINS": str(tmp_path / "joins")}
    with Job(tmp_path, "--workers", "3", overrides=KEYS, script=script, env=env) as job:
        job.wait_for_steps(3)
        job.kill("2")
        job.wait_for(lambda: "worker 3 on" in str(job.generations()), "the joining worker")
        job.hurry()
        job.finish()
    assert_same(summary(job.run), reference(*KEYS))
    assert_no_step_lost(job.run)


HALTS = """
import ctypes, os, select, sys
ptrace = ctypes.CDLL(None, use_errno=True).ptrace
ptrace.argtypes = [ctypes.c_long] * 4
for thread in map(int, os.listdir(f"/proc/{sys.argv[1]}/task")):
    assert ptrace(0x4206, thread, 0, 0) == 0, os.strerror(ctypes.get_errno())  # seize
    assert ptrace(0x4207, thread, 0, 0) == 0  # interrupt
    os.waitpid(thread, 0x40000000)
print("halted", flush=True)
while not select.select([0], [], [], 0.05)[0]:  # the end of stdin lets them go
    try:
        os.waitpid(-1, os.WNOHANG | 0x40000000)  # as debuggers do: the parent hears of an end after them
    except ChildProcessError:
        break
"""


@contextmanager
def halted(pid):
    """A process as a debugger halts it, every thread."""
    with subprocess.Popen([sys.executable, "-c", HALTS, str(pid)], stdin=-1, stdout=-1, text=True) as tracer:
        if tracer.stdout.readline() != "halted\n":
            pytest.skip("may not trace here")
        yield
        tracer.stdin.close()


def test_a_debugger_may_halt_a_worker_for_a_while(reference, tmp_path):
    deaf = tmp_path / "deaf.py"
    deaf.write_text(
        "import runpy, sys\nfrom lockstep.elastic import launcher\nlauncher._DEAF_S = 5.0\n"
        f"runpy.run_path({str(Path(__file__).with_name('paced.py'))!r}, run_name='__main__')"
    )
    arguments = train_command(tmp_path, "--workers", "2", overrides=PACED)
    command = [sys.executable, str(deaf), *arguments[arguments.index("lockstep") + 1 :]]
    with Job(tmp_path, command=command) as job:
        job.wait_for_steps(3)
        with halted(job.workers()["1"]):
            before = job.steps()
            time.sleep(2)
            assert job.steps() <= before + 1 and not job.generations(), "the others wait"
        job.wait_for_steps(before + 3)
        assert not job.generations()
        with halted(job.workers()["1"]):
            job.wait_for(lambda: "no heartbeat for 5 s and is ended" in str(job.generations()), "its end")
        job.hurry()
        job.finish()
    assert_same(summary(job.run), reference(*PACED))


def test_without_restarts_the_last_worker_finishes(reference, tmp_path):
    with Job(tmp_path, "--workers", "3", "--restarts", "0", overrides=KEYS, paced=True) as job:
        job.wait_for_steps(2)
        job.kill("0", "2")
        job.hurry()
        output, _ = job.finish()
    assert_same(summary(job.run), reference(*KEYS))
    assert summary(job.run)["workers"] == 1 and "1 worker went on from step" in output


def test_nobody_is_left(reference, tmp_path):
    with Job(tmp_path, "--workers", "2", "--restarts", "0", overrides=KEYS, paced=True) as job:
        job.wait_for_steps(9)
        job.kill("0", "1")
        _, errors = job.finish(1)
    assert errors.count("\n") == 1
    assert "no worker is left; the same command with --resume auto goes on" in errors
    again = train_command(tmp_path, "--resume", "auto", "--workers", "2", overrides=KEYS)
    done = forked.call(again, launches=True)
    assert done.returncode == 0, done.stderr
    assert_same(summary(job.run), reference(*KEYS))


def test_all_at_once_come_back_from_the_checkpoint(reference, tmp_path):
    with Job(tmp_path, "--workers", "2", overrides=KEYS, paced=True) as job:
        job.wait_for_steps(9)
        job.kill("0", "1")
        job.hurry()
        job.finish()
    assert_same(summary(job.run), reference(*KEYS))
    assert_no_step_lost(job.run)


def test_below_the_least_number_it_waits_then_saves_and_stops(reference, tmp_path):
    flags = ["--workers", "3", "--min-workers", "3", "--restarts", "0", "--wait", "0.5"]
    with Job(tmp_path, *flags, overrides=KEYS, paced=True) as job:
        job.wait_for_steps(4)
        job.kill("0")
        _, errors = job.finish(143)
    assert re.search(
        r"worker 0 on \S+ was killed by SIGKILL; 2 of at least 3 are left: too few workers, waiting",
        errors,
    )
    assert errors.count("too few workers, waiting") == 1, errors
    assert "stopped because too few workers are left after step" in errors
    assert "--min-workers 3 --wait 0.5 --restarts 0" in errors, "the way on keeps the flags"
    assert "worker 0 on" in str(job.generations()), "it is written down"
    assert "the state is saved: go on with `lockstep train --resume" in errors
    done = forked.call(train_command(tmp_path, "--resume", "auto", overrides=KEYS))
    assert done.returncode == 0, done.stderr
    assert_same(summary(job.run), reference(*KEYS))


def test_it_waits_for_the_one_that_comes_back(reference, tmp_path):
    with Job(tmp_path, "--workers", "2", "--min-workers", "2", overrides=KEYS, paced=True) as job:
        job.wait_for_steps(2)
        job.kill("1")
        job.hurry()
        job.finish()
    assert_same(summary(job.run), reference(*KEYS))
    assert all(row["workers"] == 2 for row in summary(job.run)["generations"])


def test_too_few_at_the_start(tmp_path):
    flags = ["--workers", "2", "--min-workers", "2", "--restarts", "0", "--wait", "0.5"]
    with Job(tmp_path, *flags) as job:
        job.wait_for_workers("1")
        job.kill("1")
        _, errors = job.finish(143)
    assert "too few workers" in errors and "step 0; the state is saved" in errors


def test_a_signal_while_it_waits_saves(tmp_path):
    flags = ["--workers", "2", "--min-workers", "2", "--restarts", "0"]
    with Job(tmp_path, *flags, overrides=KEYS, paced=True) as job:
        job.wait_for_steps(2)
        job.kill("1")
        job.wait_for(lambda: "too few workers, waiting" in job.errors(), "it to wait")
        job.process.send_signal(signal.SIGTERM)
        _, errors = job.finish(143)
    assert "the state is saved" in errors


def test_the_launcher_dies_and_the_run_is_resumed(reference, tmp_path):
    with Job(tmp_path, "--workers", "3", overrides=KEYS, paced=True) as job:
        job.wait_for_steps(7)
        job.workers()
        job.process.kill()
        job.process.wait()
        job.assert_no_orphan()
    again = train_command(tmp_path, "--resume", "auto", "--workers", "2", overrides=KEYS)
    done = forked.call(again, launches=True)
    assert done.returncode == 0, done.stderr
    assert_same(summary(job.run), reference(*KEYS))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_and_a_loss(reference, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if call(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)]).returncode:
        pytest.skip("cannot mount here")
    try:
        with Job(disk, "--workers", "2", overrides=KEYS, paced=True, draws=True) as job:
            job.wait_for_steps(10)
            job.kill("0")
            job.hurry()
            output, errors = job.finish(1)
    finally:
        call(["umount", "-l", str(disk)])
    assert errors.count("the run is trained, but its checkpoint of step") == 1
    assert "NOT saved: No space left on device" in output
    assert f"weights_sha256 {reference(*KEYS)['weights_sha256']}" in output
