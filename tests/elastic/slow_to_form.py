"""As paced.py, but worker 1 has formed its second group only when another worker has wanted to join.

If that began a generation, worker 1 has left for it, and the thread that forms the group stays, as one of
gloo's does that waits for a worker which has left, too.
"""

import os
import runpy
import threading
import time
from pathlib import Path

from lockstep.spec.world import VARIABLE

JOINS = Path(os.environ["JOINS"])  # says that it wanted to join


def form_late(store, place):
    group = form(store, place)
    if store._link._world.name == "1" and store._generation == 2:
        while not JOINS.exists():
            time.sleep(0.01)
        time.sleep(0.5)
        if store._link._entered > store._generation:
            threading.Event().wait()
    return group


def tell_joining(self, op, **fields):
    say(self, op, **fields)
    if op == "ready" and self._world.joins:
        JOINS.touch()


if VARIABLE in os.environ:  # a worker; a launcher imports no torch
    from lockstep.elastic import launcher_link

    form, launcher_link.form = launcher_link.form, form_late
    say, launcher_link.LauncherLink.say = launcher_link.LauncherLink.say, tell_joining
runpy.run_path(str(Path(__file__).with_name("paced.py")), run_name="__main__")
