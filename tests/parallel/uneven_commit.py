"""`lockstep train …` in which one worker is killed after step 5 and worker 0 does not learn of its commit."""

import importlib
import os
import signal
from pathlib import Path

from lockstep.cli.main import main
from lockstep.errors import GroupLost

step = importlib.import_module("lockstep.train.step")
AT, KILLED = 5, Path(os.environ["KILLED"])


def merge(group, mine, inner=step.merge_stages):
    told = inner(group, mine)
    merge.calls += 1
    if merge.calls == AT and group.rank == group.size - 1 and not KILLED.exists():
        group.barrier()
        KILLED.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if merge.calls == AT and not KILLED.exists():
        group.barrier()
        if group.rank == 0:
            raise GroupLost("as if the others were lost before their numbers came")
    return told


merge.calls = 0
step.merge_stages = merge
raise SystemExit(main())
