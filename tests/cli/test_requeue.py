"""A training that a batch system warns: it saves, asks to be queued again, and goes on to the same bits."""

import os
import signal
from pathlib import Path

import pytest
from job import Job
from small import rows, small_run, summary, train

from lockstep.cli.batch.requeue import queue_again
from lockstep.errors import GroupLost, Interrupted
from lockstep.spec import Launch

KEYS = ("train.epochs=3", "checkpoint.every_steps=1000", "data.num_test=10")
SCONTROL = """#!/bin/sh
echo "$@" >> {said}
[ "$1" = show ] && echo "JobId=7 JobState={state} PreemptTime={preempted}"
[ "$1" = show ] || {{ echo "{refused}" >&2; exit {code}; }}
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A stand-in for scontrol, for where there is no Slurm: it notes what it is asked."""

    def answer(state="RUNNING", preempted="None", refused="", code=0):
        command = tmp_path / "bin" / "scontrol"
        command.parent.mkdir(exist_ok=True)
        text = SCONTROL.format(said=said, state=state, preempted=preempted, refused=refused, code=code)
        command.write_text(text)
        command.chmod(0o755)
        monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
        return said

    said = tmp_path / "said"
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    before = signal.getsignal(signal.SIGTERM)
    yield answer
    signal.signal(signal.SIGTERM, before)


def stopped(number):
    return Interrupted("stopped", number)


def test_a_warned_job_is_queued_again(slurm, monkeypatch):
    said = slurm()
    told = queue_again(stopped(signal.SIGUSR1), Launch(resume="auto"))
    assert told == "Slurm's job 7 is queued again, and goes on from what is saved"
    assert said.read_text() == "requeue 7\n"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "5")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    queue_again(stopped(signal.SIGUSR1), Launch(resume="auto"))
    assert said.read_text().endswith("requeue 5_2\n"), "of an array only this task"


def test_launchers_that_lost_their_coordinator_ask_too(slurm):
    said = slurm()
    assert "is queued again" in queue_again(GroupLost("the coordinator is lost"), Launch(resume="auto"))
    assert said.read_text() == "requeue 7\n"


@pytest.mark.parametrize(
    ("number", "facts", "is_asked"),
    [
        (signal.SIGTERM, {}, False),
        (signal.SIGTERM, {"preempted": "2026-11-19T04:00:00"}, True),
        (signal.SIGTERM, {"state": "PREEMPTED"}, True),
        (signal.SIGTERM, {"state": "CANCELLED"}, False),
        (signal.SIGINT, {"preempted": "2026-11-19T04:00:00"}, False),
    ],
)
def test_who_cancels_a_job_does_not_want_it_back(number, facts, is_asked, slurm):
    said = slurm(**facts)
    assert bool(queue_again(stopped(number), Launch(resume="auto"))) is is_asked
    assert ("requeue" in (said.read_text() if said.exists() else "")) is is_asked


def test_a_job_that_would_begin_anew_is_not_queued_again(slurm, tmp_path):
    said, checkpoint = slurm(), tmp_path / "step3.json"
    checkpoint.touch()
    assert "give --resume auto" in queue_again(stopped(signal.SIGUSR1), Launch())
    assert "give --resume auto" in queue_again(stopped(signal.SIGUSR1), Launch(resume=str(checkpoint)))
    assert not said.exists()


def test_what_slurm_refuses_is_said(slurm, monkeypatch):
    slurm(refused="Requested operation is presently disabled", code=1)
    told = queue_again(stopped(signal.SIGUSR1), Launch(resume="auto"))
    assert told == (
        "Slurm does not queue job 7 again (Requested operation is presently disabled): submit the same batch "
        "file once more"
    )
    monkeypatch.setenv("PATH", "/nowhere")
    told = queue_again(stopped(signal.SIGUSR1), Launch(resume="auto"))
    assert "(scontrol requeue: No such file or directory)" in told


def test_without_slurm_nothing_is_asked(slurm, monkeypatch):
    said = slurm()
    monkeypatch.delenv("SLURM_JOB_ID")
    assert queue_again(stopped(signal.SIGUSR1), Launch(resume="auto")) is None and not said.exists()


@pytest.mark.gloo
@pytest.mark.parametrize("to", ["worker", "all"])
def test_a_warning_saves_on_all_workers_and_the_next_job_goes_on(to, slurm, tmp_path):
    """A batch system warns the first process of a job, or each process there is, also while it saves."""
    said = slurm()
    with Job(tmp_path, "--workers", "2", "--resume", "auto", overrides=KEYS, paced=True) as job:
        job.wait_for_steps(3)
        workers = job.workers()
        pids = {
            "worker": [workers["1"]],
            "all": [*workers.values(), job.fork_server(), job.process.pid],
        }
        for pid in pids[to]:
            os.kill(pid, signal.SIGUSR1)
        _, errors = job.finish(138)
    assert "stopped by SIGUSR1 after step" in errors and "the state is saved" in errors, errors
    assert "Slurm's job 7 is queued again" in errors and said.read_text() == "requeue 7\n", errors
    assert "Traceback" not in errors and not (job.run / "summary.json").exists()
    steps = job.steps()
    with Job(tmp_path, "--workers", "3", "--resume", "auto", overrides=KEYS) as again:
        again.finish()
    expected, _ = train(small_run(*KEYS), tmp_path / "calm")
    assert summary(job.run)["weights_sha256"] == expected.summary["weights_sha256"]
    assert [row["step"] for row in rows(job.run, "step")][steps] == steps + 1, "no step was done again"


def test_the_batch_files_are_whole():
    for path in (Path(__file__).parents[2] / "examples" / "slurm").glob("*.sbatch"):
        text = path.read_text()
        for word in ("--signal=USR1@", "--requeue", "--resume auto", "$SLURM_JOB_ID"):
            assert word in text, f"{path.name}: {word}"
