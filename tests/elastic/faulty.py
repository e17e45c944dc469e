"""A training script whose workers end themselves at chosen points of chosen steps, once each.

FAULTS in the environment is a JSON list of [point, step, rank]; a file in FAULT_DIR says that one happened.
"""

import functools
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import lockstep
from lockstep.cli import listeners
from lockstep.elastic import restart
from lockstep.runs import checkpoint, journal
from lockstep.runs.saving.saver import Saver
from lockstep.spec.run_file import from_table, merge, parse_overrides, to_table
from lockstep.train import loop, setup, worker
from lockstep.train import optimizer as rules
from lockstep.train import step as steps
from lockstep.train.evaluation.host_evaluate import Evaluator
from lockstep.train.step import Step

FAULTS = [(point, step, rank) for point, step, rank in json.loads(os.environ["FAULTS"])]
WORKERS = 3
PATIENCE_S = 30.0
restart.MOST_S = 0.02
here: dict[str, Any] = {"step": 0, "rank": -1}
beside = threading.local()  # in the thread that writes checkpoints: the step of the one that is written


def mark(fault):
    """The file that says that a fault has happened."""
    return Path(os.environ["FAULT_DIR"]) / "-".join(map(str, fault)).replace(" ", "_")


def maybe_die(point):
    """End this process as a kill would, if this is the time, the place and the worker."""
    fault = (point, getattr(beside, "step", here["step"]), here["rank"])
    if fault in FAULTS and not mark(fault).exists():
        mark(fault).touch()
        if point == "a worker raises":
            raise ValueError("it raised")
        os.kill(os.getpid(), signal.SIGKILL)


def around(owner, name, before="", after=""):
    """Let a function of ours die before or after its work."""
    work = getattr(owner, name)

    @functools.wraps(work)
    def patched(*arguments, **options):
        maybe_die(before)
        result = work(*arguments, **options)
        maybe_die(after)
        return result

    setattr(owner, name, patched)


def note_step(self, lanes, stop, move):
    here["step"], here["rank"] = self._state.step, self._mesh.world.rank
    if any(step == here["step"] + lanes.steps for _, step, _ in FAULTS):
        move = wait_for_all()
    maybe_die("a worker raises")
    maybe_die("before the step")
    return step(self, lanes, stop, move)


def wait_for_all():
    """Until those who died are replaced, as one that raised is not; says whether to move to their group."""
    everyone = WORKERS - sum(fault[0] == "a worker raises" and mark(fault).exists() for fault in FAULTS)
    end, link = time.monotonic() + PATIENCE_S, here["groups"]._link
    while len(link._newest.workers) < everyone and time.monotonic() < end:
        time.sleep(0.01)
    return link.wants_to_move


def note_commit(self):
    beside.step = self.step - 1  # after which it was begun
    commit(self)
    del beside.step


def note_rank(self, group, interrupt):
    here["rank"], here["groups"] = group.rank, self.groups
    return train(self, group, interrupt)


step, Step.__call__ = Step.__call__, note_step
train, worker._Worker._train = worker._Worker._train, note_rank
around(Step, "_commit", "before the commit", "after the commit")
around(rules, "update_params", "", "within the commit")
around(steps, "average_weights", "", "within the commit, after the averages")
around(journal.Journal, "step", "before the row", "after the row")
around(Saver, "save", "before the checkpoint", "after the checkpoint is begun")
commit, checkpoint.NewCheckpoint.commit = checkpoint.NewCheckpoint.commit, note_commit
around(checkpoint, "file_sha256", "before the checkpoint's hash")
around(checkpoint, "sync_folder", "", "between the checkpoint's files")
around(checkpoint, "prune", "before the pruning", "after the checkpoint")
around(Evaluator, "__call__", "before the evaluation", "after the evaluation")
around(journal.Journal, "epoch", "before the epoch's row", "after the epoch's row")
around(worker, "call_roll", "in the recovery", "in the recovery, after the roll call")
around(setup, "lower_for_host", "in the recovery, before the step")
around(loop, "prove_state", "at the end")
around(journal.Journal, "finish", "before the summary", "after the summary")
around(listeners, "draw_curves", "before the picture")

run = from_table(merge(to_table(lockstep.recipe("shapes")), parse_overrides(json.loads(os.environ["KEYS"]))))
launch = lockstep.Launch(
    name="run",
    runs_dir=Path(os.environ["RUNS_DIR"]),
    device="cpu",
    workers=WORKERS,
    restarts=100,
    copy_every=3,
)
lockstep.train(run, launch=launch, on_event=lambda event: None)
