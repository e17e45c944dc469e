"""An example of examples/loops with more epochs, whose workers die where the variable FAULTS says.

FAULTS holds rows of [point, step, rank]; each happens once, at that step or, if the worker is alone then, at
the first later one where it is not. Of each a file in FOLDER tells. With ERROR a worker raises one instead.
"""

import importlib.util
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from lockstep.comm.group import Group
from lockstep.errors import LockstepError
from lockstep.lanes import session as sessions
from lockstep.lanes.evaluation import BlockSums
from lockstep.lanes.lane_step import LaneStep
from lockstep.lanes.rounds import Rounds
from lockstep.lanes.step_reduction import StepReduction

FAULTS, FOLDER = json.loads(os.environ.get("FAULTS", "[]")), Path(os.environ.get("FOLDER", "."))
current = []


def suffer(point, *arguments):
    """End here if a fault is due. The last worker lives: the state is only in its memory."""
    rounds = current[-1].script.rounds if current else None
    if rounds is None or rounds._group is None or rounds.arrival:
        return
    group, step = rounds._group, rounds.cursor.step
    groups = [each for each in arguments if isinstance(each, Group)]  # one that is being entered
    if not (groups and point.startswith("after")):  # then all of it have the state
        groups.append(group)
    if min(each.size for each in groups) == 1:
        return
    for fault in FAULTS:
        mark = FOLDER / "-".join(map(str, fault)).replace(" ", "_")
        if fault[0] == point and fault[1] <= step and fault[2] == group.rank and not mark.exists():
            if point.endswith("while one waits to join"):
                wait_for(lambda: rounds.wants_to_move)
            with suppress(FileExistsError):
                mark.touch(exist_ok=False)
                end()


def end():
    if "ERROR" in os.environ:
        raise LockstepError(os.environ["ERROR"])
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_company():
    """A worker that is alone gives a new one the time to come, so that there is somebody to be killed."""
    rounds = current[-1].script.rounds
    if FAULTS and "ERROR" not in os.environ and rounds._group and rounds._group.size == 1:
        wait_for(lambda: rounds.wants_to_move)


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)


def meet(self, inner=Rounds.meet):
    wait_for_company()
    inner(self)


def around(owner, name, before="", after=""):
    inner = getattr(owner, name)

    def call(*arguments, **options):
        suffer(before, *arguments)
        found = inner(*arguments, **options)
        suffer(after, *arguments)
        return found

    setattr(owner, name, call)


def remember(self, *arguments, inner=sessions.Session.__init__):
    inner(self, *arguments)
    current.append(self)


sessions.Session.__init__ = remember
around(LaneStep, "backward", "before the backward pass", "after the backward pass")
around(StepReduction, "finish", "before the sum", "after the sum")
around(LaneStep, "_commit", "before the update", "after the update")
Rounds.meet = meet
around(Rounds, "meet", "between batches")
around(Rounds, "_agree", "before they agree", "after they agree")
around(Rounds, "_send_state", "before the state is sent", "after the state is sent")
around(sessions, "write_state", "before the file", "after the file")
around(sessions, "write_state", "before the file, while one waits to join")
around(BlockSums, "add", "in the evaluation")

path, epochs = Path(sys.argv[1]), int(sys.argv[2])
spec = importlib.util.spec_from_file_location("example", path)
example = importlib.util.module_from_spec(spec)
sys.modules["example"] = example
spec.loader.exec_module(example)
example.EPOCHS = epochs
example.main()
