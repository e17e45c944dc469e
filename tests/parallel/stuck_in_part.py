"""`lockstep …`, whose worker 1 never forms a part of its first group: so gloo waits for one that has died."""

import os
import threading
from pathlib import Path

from lockstep.cli.main import main
from lockstep.spec.world import VARIABLE


def form_nothing(store, place):
    group = form(store, place)
    if store._link._world.name == "1" and store._generation == 1:
        group.make_part = get_stuck
    return group


def get_stuck(name, ranks):
    Path(os.environ["STUCK"]).touch()
    threading.Event().wait()


if VARIABLE in os.environ:  # a worker; a launcher imports no torch
    from lockstep.elastic import launcher_link

    form, launcher_link.form = launcher_link.form, form_nothing
main()
