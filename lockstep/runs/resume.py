"""Which directory a run trains in and what state it goes on from: new, resumed or forked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from lockstep.errors import CheckpointError, IdentityError
from lockstep.runs import checkpoint
from lockstep.runs.about import About
from lockstep.runs.checkpoint import Saved
from lockstep.runs.directory import RunDirectory
from lockstep.runs.event import Listener, Notice
from lockstep.spec import Launch, Run
from lockstep.spec.identity import Identity, differences, digest, is_scripted

_SHOWN = 6
_LET_GO_S = 10.0  # for the worker before to be gone, on a disk that several nodes share


def open_directory(
    about: About, launch: Launch, on_event: Listener, announce: Callable[[Path], None]
) -> tuple[RunDirectory, Saved | None]:
    """The run's directory, held for this process, and the checkpoint to go on from, if any."""
    name = launch.name or f"{about.data}-{about.model}".replace("/", "-")
    if launch.resume:
        directory, path = find_resumed(launch, name)
        if directory:
            _check_identity(directory, about.identity)
            with _held(directory):
                return directory, _choose(directory, path, on_event)
        on_event(Notice(f"--resume auto: no run '{name}' in {launch.runs_dir}; starting a new one"))
    directory = RunDirectory.create(launch.runs_dir, name, announce)
    with _held(directory):
        directory.describe(_with_whole_paths(about.run), about.identity)
    return directory, None


def reopen_directory(
    path: Path, about: About, on_event: Listener, is_lost: bool
) -> tuple[RunDirectory, Saved | None]:
    """The directory that a worker before this one kept; `is_lost`: no worker has the state any more."""
    path.mkdir(exist_ok=True)  # that worker may have ended before it made it
    directory = RunDirectory(path)
    with _held(directory, _LET_GO_S):
        if not (path / "identity.json").is_file():
            directory.describe(_with_whole_paths(about.run), about.identity)
        _check_identity(directory, about.identity)
        return directory, _choose(directory, None, on_event) if is_lost else None


@contextmanager
def _held(directory: RunDirectory, patience_s: float = 0.0) -> Iterator[None]:
    """Hold a directory, and let it go only if what follows fails."""
    directory.hold(patience_s)
    try:
        yield
    except BaseException:
        directory.close()
        raise


def _with_whole_paths(run: Run) -> Run:
    """Paths that mean the same from any folder, for run.toml."""

    def whole(path: str | None) -> str | None:
        return str(Path(path).resolve()) if path else None

    return replace(
        run,
        data=replace(run.data, dir=whole(run.data.dir)),
        model=replace(run.model, weights=whole(run.model.weights)),
        kernels=replace(run.kernels, table=whole(run.kernels.table)),
    )


def find_resumed(launch: Launch, name: str | None) -> tuple[RunDirectory | None, Path | None]:
    """The run that --resume means, and the one checkpoint of it, if one was named."""
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
    """The identity of the run that will be resumed, where there is one."""
    if not launch.resume:
        return None
    directory, _ = find_resumed(launch, launch.name)
    return directory.identity() if directory else None


def fork_weights(launch: Launch) -> Path:
    """The tensors of the newest checkpoint of the run that --fork names."""
    assert launch.fork
    path = Path(launch.fork)
    if path.is_file():
        return checkpoint.load_checkpoint(path).path.with_suffix(".safetensors")
    return newest_checkpoint(find_directory(launch.runs_dir, launch.fork)).path.with_suffix(".safetensors")


def newest_checkpoint(directory: RunDirectory) -> Saved:
    """The newest whole checkpoint of a run that must have one."""
    saved = checkpoint.load_newest(directory.checkpoints, warn=lambda text: None)
    if saved is None:
        raise CheckpointError(f"{directory.path}: no checkpoint was saved yet")
    return saved


def check_checkpoint(saved: Saved, identity: Identity) -> None:
    """Refuse a checkpoint that another run wrote, wherever it lies."""
    if saved.manifest.get("identity") != digest(identity):
        raise IdentityError(f"{saved.path} is a checkpoint of another run: remove it or name another")


def _choose(directory: RunDirectory, path: Path | None, on_event: Listener) -> Saved | None:
    """The checkpoint to go on from: the one at `path`, else the newest that is whole."""

    def warn(text: str) -> None:
        on_event(Notice(text, warning=True))

    saved = checkpoint.load_checkpoint(path) if path else checkpoint.load_newest(directory.checkpoints, warn)
    if saved:
        check_checkpoint(saved, directory.identity())
    return saved


def _check_identity(directory: RunDirectory, ours: Identity) -> None:
    theirs = directory.identity()
    found = differences(theirs, ours)
    if is_scripted(theirs) and not is_scripted(ours):
        raise IdentityError(
            f"{directory.path} was trained by a script with a module, data or a loss of its own: run that "
            f'script with launch=lockstep.Launch(resume="{directory.path}")'
        )
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise IdentityError(
            f"{directory.path} is another run, so it cannot be resumed as this one: "
            f"{'; '.join(found[:_SHOWN])}{more}. To go on with its own settings: --resume {directory.path} "
            f"without recipe, file or -o; to start a new run from its weights: --fork {directory.path}"
        )
