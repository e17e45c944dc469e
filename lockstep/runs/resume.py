"""Finds the directory and checkpoint a run starts from, new, resumed or forked; refuses another identity."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.errors import CheckpointError, IdentityError, LockstepError
from lockstep.models.pretrained import PRETRAINED
from lockstep.runs import checkpoint
from lockstep.runs.about import About
from lockstep.runs.checkpoint import Saved
from lockstep.runs.directory import RunDirectory
from lockstep.runs.event import Listener, Notice
from lockstep.spec import Launch, Run
from lockstep.spec.identity import (
    HISTORY,
    INITIAL_WEIGHTS,
    Identity,
    add_change,
    changed_data,
    differences,
    digest,
    is_digest_of,
    is_scripted,
)

_SHOWN = 6
_LET_GO_S = 10.0  # to wait for the previous worker 0 to release the lock, on a disk that nodes share


def open_directory(
    about: About, launch: Launch, on_event: Listener, announce: Callable[[Path], None]
) -> tuple[RunDirectory, Saved | None]:
    """Open and lock the run's directory; also returns the checkpoint to continue from, if any."""
    name = _name(about, launch)
    if launch.resume:
        directory, path = find_resumed(launch, name)
        if directory:
            with _held(directory):
                _check_identity(directory, about.identity, on_event)
                return directory, _choose(directory, path, on_event)
        on_event(Notice(f"--resume auto: no run '{name}' in {launch.runs_dir}; starting a new one"))
    directory = RunDirectory.create(launch.runs_dir, name, announce)
    with _held(directory):
        directory.describe(_with_whole_paths(about.run), about.identity)
    return directory, None


def reopen_directory(
    path: Path, about: About, on_event: Listener, is_lost: bool
) -> tuple[RunDirectory, Saved | None]:
    """Take over the directory of a previous worker 0; `is_lost`: no worker has the state in memory.

    That worker may have been on another node, or may have died before it made the directory.
    """
    directory = RunDirectory(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with _held(directory, _LET_GO_S):
            if not (path / "identity.json").is_file():
                directory.describe(_with_whole_paths(about.run), about.identity)
            _check_identity(directory, about.identity, on_event)
            return directory, _choose(directory, None, on_event) if is_lost else None
    except OSError as error:
        raise LockstepError(
            f"the run's directory {path} cannot be kept by {socket.gethostname()}, whose worker takes over: "
            f"{error.strerror or error}; give --runs-dir a folder on a disk that all nodes share"
        ) from None


@contextmanager
def _held(directory: RunDirectory, patience_s: float = 0.0) -> Iterator[None]:
    """Lock a directory, and release it only if the body fails."""
    directory.hold(patience_s)
    try:
        yield
    except BaseException:
        directory.close()
        raise


def _with_whole_paths(run: Run) -> Run:
    """The Run with absolute paths, for run.toml."""

    def whole(path: str | None) -> str | None:
        return str(Path(path).resolve()) if path else None

    return replace(
        run,
        data=replace(run.data, dir=whole(run.data.dir)),
        model=run.model
        if run.model.weights == PRETRAINED
        else replace(run.model, weights=whole(run.model.weights)),
        kernels=replace(run.kernels, table=whole(run.kernels.table)),
    )


def find_resumed(launch: Launch, name: str | None) -> tuple[RunDirectory | None, Path | None]:
    """The run that --resume names, and the path of a checkpoint if it names one."""
    assert launch.resume
    if launch.resume == "auto":
        return (RunDirectory.newest(launch.runs_dir, name) if name else None), None
    path = Path(launch.resume)
    return find_directory(launch.runs_dir, launch.resume), path if path.is_file() else None


def find_directory(runs_dir: Path, run: str) -> RunDirectory:
    """The directory of a run given by its name, its path or the path of one of its checkpoints."""
    path = Path(run)
    return RunDirectory.find(runs_dir, str(path.parent.parent) if path.is_file() else run)


def recorded_identity(launch: Launch) -> Identity | None:
    """The identity of the run that will be resumed, if it has a checkpoint: else it begins anew."""
    if not launch.resume:
        return None
    directory, _ = find_resumed(launch, launch.name)
    return directory.identity() if directory and checkpoint.checkpoint_steps(directory.checkpoints) else None


def continued_identity(about: About, launch: Launch) -> Identity:
    """The identity of this run; if it is resumed with changed data, it includes the history of its data."""
    directory, path = find_resumed(launch, _name(about, launch)) if launch.resume else (None, None)
    if directory is None:
        return about.identity
    theirs = directory.identity()
    ours = {key: value for key, value in about.identity.items() if key != HISTORY}
    if HISTORY in theirs:
        ours[HISTORY] = theirs[HISTORY]
    if INITIAL_WEIGHTS in theirs and INITIAL_WEIGHTS in ours:
        ours[INITIAL_WEIGHTS] = theirs[INITIAL_WEIGHTS]  # a checkpoint holds the weights now
    if not launch.data_changed or not changed_data(theirs, ours):
        return ours
    if directory.summary():
        raise IdentityError(
            f"--data-changed: {directory.path} is finished, so nothing is left to do with other data: "
            f"to start a new run from its weights: --fork {directory.path}"
        )
    saved = checkpoint.load_checkpoint(path) if path else newest_checkpoint(directory)
    return add_change(theirs, ours, int(saved.manifest["cursor"]["step"]))


def _name(about: About, launch: Launch) -> str:
    return launch.name or f"{about.data}-{about.model}".replace("/", "-")


def fork_weights(launch: Launch) -> Path:
    """The tensors of the newest checkpoint of the run that --fork names."""
    assert launch.fork
    path = Path(launch.fork)
    if path.is_file():
        return checkpoint.load_checkpoint(path).path.with_suffix(".safetensors")
    return newest_checkpoint(find_directory(launch.runs_dir, launch.fork)).path.with_suffix(".safetensors")


def newest_checkpoint(directory: RunDirectory) -> Saved:
    """The newest undamaged checkpoint of a run; an error if there is none."""
    saved = checkpoint.load_newest(directory.checkpoints, warn=lambda text: None)
    if saved is None:
        raise CheckpointError(f"{directory.path}: no checkpoint was saved yet")
    return saved


def check_checkpoint(saved: Saved, identity: Identity) -> None:
    """Refuse a checkpoint that another run wrote."""
    if not is_digest_of(saved.manifest.get("identity", ""), identity, int(saved.manifest["cursor"]["step"])):
        raise IdentityError(f"{saved.path} is a checkpoint of another run: remove it or name another")


def _choose(directory: RunDirectory, path: Path | None, on_event: Listener) -> Saved | None:
    """The checkpoint to continue from: the one at `path`, else the newest undamaged one."""

    def warn(text: str) -> None:
        on_event(Notice(text, warning=True))

    saved = checkpoint.load_checkpoint(path) if path else checkpoint.load_newest(directory.checkpoints, warn)
    if saved:
        check_checkpoint(saved, directory.identity())
    return saved


def _check_identity(directory: RunDirectory, ours: Identity, on_event: Listener) -> None:
    """Refuse to resume another run; a run with --data-changed gets its new identity written."""
    theirs = directory.identity()
    found = differences(theirs, ours)
    if is_scripted(theirs) and not is_scripted(ours):
        raise IdentityError(
            f"{directory.path} was trained by a script with a module, data or a loss of its own: run that "
            f'script with launch=lockstep.Launch(resume="{directory.path}")'
        )
    change = ours.get(HISTORY, [{}])[-1]
    if change.get("identity") == digest(theirs):
        directory.write_identity(ours)
        on_event(Notice(_tell_change(change, ours), warning=True))
        for step, manifest in checkpoint.checkpoint_steps(directory.checkpoints).items():
            if step > change["step"]:
                manifest.unlink()
                on_event(Notice(f"{manifest} is dropped: it is of the data before the change", warning=True))
    elif found:
        raise IdentityError(_refuse(directory.path, found, bool(changed_data(theirs, ours))))


def _tell_change(change: dict[str, Any], ours: Identity) -> str:
    before = {key: "absent" if value is None else value for key, value in change["before"].items()}
    fields = differences(before, {key: ours.get(key, "absent") for key in before}, ("before", "now"))
    return (
        f"the data was changed after step {change['step']} ({'; '.join(fields)}): from here on this is "
        "another run, with bits of its own; identity.json says so"
    )


def _refuse(path: Path, found: list[str], only_data: bool) -> str:
    """Why a run is not resumed, and what can be done instead."""
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    shown = f"{'; '.join(found[:_SHOWN])}{more}"
    fork = f"to start a new run from its weights: --fork {path}"
    if only_data:
        return (
            f"{path} was trained on other data than there is now: {shown}. If it was changed on purpose, for "
            f"example to repair a file: --resume {path} --data-changed goes on with it, as another run "
            f"from there on; {fork}"
        )
    if all(field.startswith("numerics.") for field in found):
        return (
            f"{path} cannot be resumed here, as its steps would have other bits: {shown}. Go on where these "
            f"are what they were; {fork}"
        )
    return (
        f"{path} is another run, so it cannot be resumed as this one: {shown}. To go on with its own "
        f"settings: --resume {path} without recipe, file or -o; {fork}"
    )
