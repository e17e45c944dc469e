"""Beside training, a process that hands a run to a tracker, so that this costs training nothing.

    python -m lockstep.cli.watch.tracking_process wandb|mlflow

Worker 0 starts it, and tells it two lines of JSON on stdin: what the run is, and how it ended. All else it
reads from the run's files, so the tracker may be slow, hang or fail. What a user should know it says on
stdout, a line of JSON each; its exit code is 0 if all was handed over. It imports no torch.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from lockstep.cli.watch.follow import PATIENCE_S, Tracker, Words, follow

_NICENESS = 10
_MOST_LETTERS = 500  # of an error that is told


def _find_tracker(name: str) -> Tracker:
    if name == "wandb":
        from lockstep.cli.watch.wandb_run import WandbRun

        return WandbRun()
    from lockstep.cli.watch.mlflow_run import MlflowRun

    return MlflowRun()


def main() -> None:
    """Follow one run; what the tracker's package prints goes to where stderr does, a file."""
    os.nice(_NICENESS)  # training comes first
    stream, out = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # no package may ask for a password
    os.dup2(2, 1)

    def say(text: str, failed: bool = False) -> None:
        out.write(json.dumps({"text": text, "failed": failed}) + "\n")
        out.flush()

    try:
        words = Words(stream)
        follow(_find_tracker(sys.argv[1]), words, say)
    except Exception as error:
        signal.alarm(PATIENCE_S)  # a package may not end by itself
        lines = [line for line in str(error).splitlines() if line.strip()]
        say(f"{type(error).__name__}: {lines[0] if lines else ''}"[:_MOST_LETTERS], failed=True)
        raise


if __name__ == "__main__":
    main()
