"""Which checkpoints of a run nothing needs any more, and their removal: never the newest or the best."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import BadInput, CheckpointError, LockstepError
from lockstep.runs.checkpoint import checkpoint_steps, load_checkpoint, prune, surplus_files
from lockstep.runs.directory import RunDirectory
from lockstep.runs.listing.listed_run import is_held
from lockstep.runs.resume import check_checkpoint


@dataclass(frozen=True)
class Surplus:
    """What can be removed of a run, and what stays; or the reason why all of it stays."""

    path: Path
    kept: tuple[int, ...] = ()  # steps of checkpoints
    files: tuple[Path, ...] = ()
    num_bytes: int = 0
    reason: str = ""


def find_surplus(path: Path, keep: int, removes: bool = False) -> Surplus:
    """What can be removed but the newest `keep` checkpoints and the best; `removes` it, too.

    The newest one is read first: if it is damaged, those before it are needed.
    """
    directory = RunDirectory(path)
    try:
        if removes:
            directory.hold()
        elif is_held(path):  # who only looks must not hold up a run that begins to go on
            return Surplus(path, reason=f"{path} is being trained by another process")
    except LockstepError as error:
        return Surplus(path, reason=str(error))
    try:
        steps = checkpoint_steps(directory.checkpoints)
        if not steps:
            return Surplus(path, reason=f"{path}: no checkpoint was saved yet")
        newest = max(steps)
        saved = load_checkpoint(steps[newest])
        check_checkpoint(saved, directory.identity())  # one that was copied here would cost the run its own
        best = int(saved.manifest["cursor"]["best_step"])
        files = surplus_files(directory.checkpoints, keep, newest, best)
        kept = sorted(step for step, manifest in steps.items() if manifest not in files)
        size = sum(file.stat().st_size for file in files)
        if removes:
            prune(directory.checkpoints, keep, newest, best)
        return Surplus(path, tuple(kept), tuple(files), size)
    except (CheckpointError, BadInput) as error:
        return Surplus(path, reason=f"{error}: so the ones before it stay")
    finally:
        directory.close()
