"""`lockstep train …` in which worker 3 is killed after step 4, and VICTIM while parts of the state move.

WHEN is "before" anything of its own has moved, or "after" that, while it waits until all have theirs.
"""

import importlib
import os
import signal
from pathlib import Path

from lockstep.cli.main import main
from lockstep.spec.world import read_world

KILLED = Path(os.environ["KILLED"])


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def end_after_step_4():
    step = importlib.import_module("lockstep.train.step").Step
    take = step.__call__
    step.__call__ = lambda self, *given: die() if self._state.step == 4 else take(self, *given)


def end_while_parts_move():
    parts = importlib.import_module("lockstep.runs.held_state").HeldParts
    move = parts.move

    def move_once(self, own):
        if os.environ["WHEN"] == "after" or KILLED.exists():
            move(self, own)
        if not KILLED.exists():
            KILLED.touch()
            die()

    parts.move = move_once


world = read_world(os.environ)  # None in the launcher, which imports no torch
if world and world.name == "3":
    end_after_step_4()
elif world and world.name == os.environ["VICTIM"]:
    end_while_parts_move()
raise SystemExit(main())
