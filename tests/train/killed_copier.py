"""`lockstep train …` in which the workers NAMES are killed when AT steps are committed by all, once.

WHEN is "before" the next step, or "within" the copying of the state. No worker may read a checkpoint unless
READS is set.
"""

import importlib
import os
import signal
import time

from lockstep.cli.main import main
from lockstep.spec.world import read_world

AT, WHEN, NAMES = int(os.environ["AT"]), os.environ["WHEN"], os.environ["NAMES"].split()


def meet_and_die(group):
    """In the first workers only: all are here before any of them ends."""
    if not met and not world.joins:
        met.append(True)
        group.barrier()
        if world.name in NAMES:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)


met = []
world = read_world(os.environ)  # None in the launcher, which imports no torch
if world:
    owner = importlib.import_module("lockstep.train.step").Step
    copies = importlib.import_module("lockstep.runs.kept_state").KeptState
    step, take = owner.__call__, copies.take

    def step_or_die(self, *given):
        if WHEN == "before" and self._state.step == AT:
            meet_and_die(self._mesh.world)
        return step(self, *given)

    def take_or_die(self, state):
        if WHEN == "within" and state.step == AT:
            meet_and_die(self._group)
        take(self, state)

    owner.__call__, copies.take = step_or_die, take_or_die
    if "READS" not in os.environ:
        importlib.import_module("lockstep.runs.resume")._choose = None
raise SystemExit(main())
