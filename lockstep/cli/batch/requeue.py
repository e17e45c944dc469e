"""Asks Slurm to queue a job again, whose training was warned and has saved, or has lost its coordinator."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from lockstep.errors import GroupLost, LockstepError
from lockstep.spec import Launch
from lockstep.spec.start.stop_signal import WARNING
from lockstep.spec.world import slurm_job

_ANSWER_S = 30.0  # for Slurm's controller


def queue_again(ended: LockstepError, launch: Launch) -> str | None:
    """Ask for it, by one worker of the job; gives what became of it in a line, or None if nobody wants it.

    A warning asks for it, the loss of the launcher that has the coordinator, and SIGTERM where Slurm takes
    the nodes for another job; whoever cancels a job does not want it back.
    """
    job = slurm_job(os.environ)
    if job is None:
        return None
    warned = isinstance(ended, GroupLost) or ended.exit_code == 128 + WARNING
    if not warned and not (ended.exit_code == 128 + signal.SIGTERM and _is_preempted(job)):
        return None
    if not launch.resume or Path(launch.resume).is_file():
        begin = "from that checkpoint once more" if launch.resume else "anew"
        return (
            f"Slurm's job {job} is not queued again, since it would begin {begin}: give --resume auto, and a "
            "--name that no other job has"
        )
    with suppress(ValueError):  # not the main thread; Slurm ends this job's processes now, by SIGTERM first
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    refused = _call("requeue", job)[1]
    if refused:
        return f"Slurm does not queue job {job} again ({refused}): submit the same batch file once more"
    return f"Slurm's job {job} is queued again, and goes on from what is saved"


def _is_preempted(job: str) -> bool:
    """Whether Slurm is taking the nodes of a job for another one."""
    told, _ = _call("show", "job", job)
    return bool(re.search(r"\bJobState=PREEMPTED\b|\bPreemptTime=\d", told))


def _call(*words: str) -> tuple[str, str]:
    """What scontrol prints, and why it failed; an empty text if it did not."""
    try:
        done = subprocess.run(
            ["scontrol", *words], capture_output=True, text=True, timeout=_ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"scontrol {words[0]}: {getattr(error, 'strerror', None) or 'no answer'}"
    lines = done.stderr.strip().splitlines() or [f"scontrol {words[0]} ended with {done.returncode}"]
    return done.stdout, lines[-1] if done.returncode else ""
