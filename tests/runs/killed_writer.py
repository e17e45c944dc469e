"""`lockstep …` that is killed at POINT of the checkpoint of step AT, once; of several workers, NAME is.

MARK is a file that says that it happened.
"""

import importlib
import os
import signal
from pathlib import Path

from lockstep.cli.main import main
from lockstep.spec.world import read_world

AT, POINT, MARK = int(os.environ["AT"]), os.environ["POINT"], Path(os.environ["MARK"])


def die():
    if MARK.exists():
        return
    MARK.touch()
    os.kill(os.getpid(), signal.SIGKILL)


def patch(module, owner, name, work):
    """Replace a function; `work` gets the one before and its arguments."""
    place = importlib.import_module(module)
    place = getattr(place, owner) if owner else place
    before = getattr(place, name)
    setattr(place, name, lambda *given, **options: work(before, *given, **options))


def is_meant(path):
    return f"step-{AT:09}" in str(path)


def copy_half(take, copy, own):
    if begun == [AT]:
        take(copy, own[: len(own) // 2])
        die()
    return take(copy, own)


def note(begin, writer, state, new):
    begun[:] = [state.step]
    begin(writer, state, new)


def put_half(put, writer, name, tensor, start=0):
    if is_meant(writer.path):
        put(writer, name, tensor.flatten()[: tensor.numel() // 2], start)
        writer._file.flush()
        die()
    put(writer, name, tensor, start)


def before(work, path, *rest):
    if is_meant(path):
        die()
    return work(path, *rest)


def after(work, path, *rest):
    found = work(path, *rest)
    if is_meant(path):
        die()
    return found


def between(commit, new):
    if new.step == AT:
        patch("lockstep.runs.checkpoint", "", "sync_folder", lambda sync, folder: (sync(folder), die()))
    commit(new)


def in_pruning(prune, folder, keep, step, best):
    if step == AT:
        patch("pathlib", "Path", "unlink", lambda unlink, path, **rest: (unlink(path, **rest), die()))
    prune(folder, keep, step, best)


begun = []
world = read_world(os.environ)
if (world is None and "NAME" not in os.environ) or (world and world.name == os.environ.get("NAME")):
    saved, writer = "lockstep.runs.checkpoint", "lockstep.runs.saving.checkpoint_writer"
    patch(writer, "CheckpointWriter", "begin", note)
    if POINT == "copying":
        patch(writer, "StateCopy", "take", copy_half)
    elif POINT == "writing":
        patch("lockstep.runs.tensor_file", "TensorWriter", "put", put_half)
    elif POINT == "hashing":
        patch(saved, "", "file_sha256", before)
    elif POINT == "between the files":
        patch(saved, "NewCheckpoint", "commit", between)
    elif POINT == "the manifest is there":
        patch(saved, "", "write_durably", after)
    else:
        assert POINT == "pruning"
        patch(saved, "", "prune", in_pruning)
raise SystemExit(main())
