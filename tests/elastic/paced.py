"""`lockstep …`, whose worker 0 waits before each step, the later the longer, until the file HURRY is there.

So a test has time to hurt the others, however busy the machine is, and a short run does not end before.
"""

import os
import time
from pathlib import Path

from lockstep.cli.main import main
from lockstep.spec.world import VARIABLE

PACE_S, DOUBLED_AFTER = 0.1, 25  # 40 steps take 6 s, and 100 steps a minute
HURRY = Path(os.environ["HURRY"])


def pace():
    from lockstep.train.step import Step

    step = Step.__call__

    def wait_and_step(self, *arguments):
        end = time.monotonic() + PACE_S * 2 ** (self._state.step / DOUBLED_AFTER)
        while self._mesh.world.rank == 0 and not HURRY.exists() and time.monotonic() < end:
            time.sleep(0.01)
        return step(self, *arguments)

    Step.__call__ = wait_and_step


if VARIABLE in os.environ:  # a worker; a launcher imports no torch
    pace()
main()
