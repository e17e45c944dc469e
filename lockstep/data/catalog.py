"""The data sets that can be asked for by name, and what a user may set for each.

How a Run's `[data]` becomes a store, the first stop of a batch: store → order → augment → loader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.data.cifar import open_cifar10
from lockstep.data.folder import FolderOptions, open_folder
from lockstep.data.idx import FASHION, MNIST, open_idx
from lockstep.data.shapes import ShapesOptions, open_shapes
from lockstep.data.store import Store
from lockstep.errors import DataError, unknown
from lockstep.spec import Run

_KEYS = ("name", "dir", "augment")  # of every data set


@dataclass(frozen=True)
class NoOptions:
    """What a user may set under `data.` for a set that is as it was published: nothing."""


@dataclass(frozen=True)
class Source:
    """How one name is opened: its options, and the folder it reads where it reads one."""

    options: type
    generate: Callable[[Any], Store] | None = None
    read: Callable[[Any, Path], Store] | None = None
    fetchable: bool = False


def _published(open_at: Callable[[Path], Store]) -> Source:
    return Source(NoOptions, read=lambda _, folder: open_at(folder), fetchable=True)


_SOURCES = {
    "shapes": Source(ShapesOptions, generate=open_shapes),
    "mnist": _published(partial(open_idx, MNIST)),
    "fashion": _published(partial(open_idx, FASHION)),
    "cifar10": _published(open_cifar10),
    "folder": Source(FolderOptions, read=open_folder),
}


def data_names() -> tuple[str, ...]:
    """Every data set that `open_store` knows."""
    return tuple(_SOURCES)


def data_options(name: str) -> tuple[str, ...]:
    """The keys a user may set under `data.` for the set `name`."""
    return tuple(field.name for field in fields(_find(name).options))


def open_store(name: str, dir: Path | None, options: Mapping[str, Any]) -> Store:
    """Open a data set by name; its files lie in `dir`, by default data/NAME below the current folder."""
    source = _find(name)
    checked = _check_options(name, source.options, options)
    if source.generate is not None:
        return source.generate(checked)
    assert source.read is not None, "a source generates or reads"
    return source.read(checked, _check_folder(name, source, dir or Path("data") / name))


def open_data(run: Run) -> Store:
    """The data set a Run names."""
    return open_store(run.data.name, Path(run.data.dir) if run.data.dir else None, run.data.options)


def _find(name: str) -> Source:
    if name not in _SOURCES:
        raise DataError(unknown("data set", name, _SOURCES))
    return _SOURCES[name]


def _check_options(name: str, kind: type, options: Mapping[str, Any]) -> Any:
    """The options as their dataclass, with every key known and of the type of its default."""
    defaults = {field.name: field.default for field in fields(kind)}
    for option, value in options.items():
        if option not in defaults:
            own = unknown("key", option, [*_KEYS, *defaults])
            raise DataError(f"data.{option}: {own}{'' if defaults else f'; {name} has none of its own'}")
        wanted = type(defaults[option])
        allowed = (int, float) if wanted is float else (wanted,)
        if isinstance(value, bool) or not isinstance(value, allowed):
            raise DataError(
                f"data.{option}={value!r}: must be {_article(wanted)}, not {_article(type(value))}; "
                f"the default is {defaults[option]!r}"
            )
    return kind(**options)


def _article(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'aeiou' else 'a'} {kind.__name__}"


def _check_folder(name: str, source: Source, folder: Path) -> Path:
    if folder.is_dir():
        return folder
    fault = "not a folder" if folder.exists() else "no such folder"
    fetch = f"run `lockstep data get {name} --dir {folder}` or " if source.fetchable else ""
    what = (
        "a folder that holds one folder of images a class"
        if name == "folder"
        else f"where the {name} files are"
    )
    raise DataError(f"data.dir={folder}: {fault}: {fetch}set data.dir to {what}")
