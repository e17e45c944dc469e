"""Lists the data sets by name, checks their options, and opens the one that a Run's `[data]` names.

Data pipeline: store → order → augment → loader; this file opens the store. To add a data set, add a file to
this folder and an entry to `_ENTRIES`. The file is imported only when the data set is used, so that
`lockstep --help` starts fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import DataError, unknown
from lockstep.spec import Run
from lockstep.spec.sample.normalization import fit_channels

if TYPE_CHECKING:
    from lockstep.data.data_set import Count, DataSet
    from lockstep.data.fetch import Published
    from lockstep.data.store import Store

_KEYS = ("name", "dir", "augment", "order", "repeats", "normalize")  # keys that every data set has
_DATA = Path("data")  # default folder for data sets


@dataclass(frozen=True)
class _Entry:
    """The file whose DATA_SETS defines the data set, and whether the set can be downloaded."""

    file: str
    fetchable: bool = False


_ENTRIES = {
    "shapes": _Entry("shapes"),
    "mnist": _Entry("idx", fetchable=True),
    "fashion": _Entry("idx", fetchable=True),
    "cifar10": _Entry("cifar", fetchable=True),
    "folder": _Entry("images.folder"),
    "csv": _Entry("images.labelled_files"),
    "pack": _Entry("pack.pack_set"),
}


def data_names(fetchable: bool = False) -> tuple[str, ...]:
    """The names of all data sets, or only of those that can be downloaded."""
    return tuple(name for name, entry in _ENTRIES.items() if entry.fetchable or not fetchable)


def data_options(name: str) -> tuple[str, ...]:
    """The keys a user may set under `data.` for the set `name`."""
    return tuple(field.name for field in fields(_find(name).options))


def published_as(name: str) -> Published:
    """The URL and files of a data set that can be downloaded."""
    if name not in data_names(fetchable=True):
        raise DataError(unknown("data set to fetch", name, data_names(fetchable=True)))
    published = _find(name).published
    assert published is not None, "a fetchable set is published"
    return published


def find_files(name: str, dir: Path | None) -> Path | None:
    """The folder that holds a data set's files, in `dir` or the default folders; None if there is none.

    `open_store` finds the same folder.
    """
    find = _find(name).find
    assert find is not None, "asked of sets that have known files"
    return next((place for folder in _folders(name, dir) if (place := find(folder))), None)


def open_store(name: str, dir: Path | None, options: Mapping[str, Any]) -> Store:
    """Open a data set by name; its files lie in `dir`, by default in data/NAME below the current folder."""
    found = _find(name)
    checked = _check_options(found.options, options)
    if found.generate is not None:
        return found.generate(checked)
    assert found.read is not None, "a data set is generated or read"
    return found.read(checked, _find_folder(found, dir))


def open_data(run: Run) -> Store:
    """Open the data set that a Run names, with the Run's normalization if it has one."""
    store = open_store(run.data.name, Path(run.data.dir) if run.data.dir else None, run.data.options)
    statistics = fit_channels(run.data.normalize, store.shape[0])
    return replace(store, mean=statistics[0], std=statistics[1]) if statistics else store


def check_data(run: Run, on_progress: Count) -> list[str]:
    """Read a Run's whole data set, and return a line for each bad file."""
    found = _find(run.data.name)
    options = _check_options(found.options, run.data.options)
    if found.read is None:
        return []  # a generated data set has no files
    folder = _find_folder(found, Path(run.data.dir) if run.data.dir else None)
    if found.check is not None:
        return found.check(options, folder, on_progress)
    try:
        found.read(options, folder)
    except DataError as error:
        return [str(error)]
    return []


def make_options(name: str, options: Mapping[str, Any]) -> Any:
    """The options of a data set, from keys that a user gave."""
    return _check_options(_find(name).options, options)


def _find(name: str) -> DataSet:
    if name not in _ENTRIES:
        raise DataError(unknown("data set", name, _ENTRIES))
    sets: tuple[DataSet, ...] = import_module(f"lockstep.data.{_ENTRIES[name].file}").DATA_SETS
    return next(each for each in sets if each.name == name)


def _check_options(kind: type, options: Mapping[str, Any]) -> Any:
    """Make the options' dataclass; refuse unknown keys, and values of another type than the default's."""
    defaults = {field.name: field.default for field in fields(kind)}
    for option, value in options.items():
        if option not in defaults:
            raise DataError(f"data.{option}: {unknown('key', option, [*_KEYS, *defaults])}")
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


def _folders(name: str, dir: Path | None) -> tuple[Path, ...]:
    """The folders to search for a data set, in this order."""
    return (_DATA / name, _DATA) if dir is None else (dir,)


def _find_folder(found: DataSet, dir: Path | None) -> Path:
    """`dir` if it is given (the data set then searches below it), else the default folder with its files."""
    folder = dir or (find_files(found.name, None) if found.find else None) or _folders(found.name, None)[0]
    if folder.is_dir():
        return folder
    fault = "not a folder" if folder.exists() else "no such folder"
    fetch = f"run `lockstep data get {found.name} --dir {folder}` or " if found.published else ""
    raise DataError(f"data.dir={folder}: {fault}: {fetch}set data.dir to {found.files}")
