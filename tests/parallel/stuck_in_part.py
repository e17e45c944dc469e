"""As paced.py, but in one generation worker 1 never forms a group of an axis, as if another had died."""

import os
import runpy
import threading
from pathlib import Path

from lockstep.spec.world import VARIABLE

PACED = Path(__file__).parents[1] / "elastic" / "paced.py"


def form_nothing(store, place):
    group = form(store, place)
    if store._link._world.name == "1" and store._generation == int(os.environ["GENERATION"]):
        group.make_part = get_stuck_beyond(group.make_part)
    return group


def get_stuck_beyond(make_part):
    def make(name, ranks):
        if name == "workers":  # of which those of the axes are parts
            part = make_part(name, ranks)
            part.make_part = get_stuck_beyond(part.make_part)
            return part
        Path(os.environ["STUCK"]).touch()
        threading.Event().wait()

    return make


if VARIABLE in os.environ:  # a worker; a launcher imports no torch
    from lockstep.elastic import launcher_link

    form, launcher_link.form = launcher_link.form, form_nothing
runpy.run_path(str(PACED), run_name="__main__")
