"""Opens the trained run that `lockstep eval`, `predict` or `export` names."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.runs.trained_run import Trained


def open_run(options: argparse.Namespace, device: str) -> Trained:
    """Open the run that the arguments name; print a note if a later run of the same name exists."""
    from lockstep.runs.directory import RunDirectory
    from lockstep.runs.trained_run import open_trained

    trained = open_trained(options.runs_dir, options.run, device=device, which=options.checkpoint)
    later = RunDirectory.newest(trained.directory.parent, options.run)
    if later and later.path.name != trained.directory.name:
        print(f"{trained.directory} is used; {later.path} is a later run of that name", file=sys.stderr)
    return trained
