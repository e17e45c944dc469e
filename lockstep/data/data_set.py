"""What a file that adds a data set defines: its options, how it is opened, where it is published.

`catalog` lists such files; a Run's `[data]`, `lockstep data` and `doctor` work with any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.data.fetch import Published
from lockstep.data.store import Store

Count = Callable[[int, int], None]  # done, in all


@dataclass(frozen=True)
class NoOptions:
    """What a user may set under `data.` for a set that is as it was published: nothing."""


@dataclass(frozen=True)
class DataSet:
    """A data set by name: either it is generated, or read from a folder."""

    name: str
    options: type = NoOptions
    generate: Callable[[Any], Store] | None = None  # by its options
    read: Callable[[Any, Path], Store] | None = None
    find: Callable[[Path], Path | None] | None = None  # the folder of its files, at or below another
    check: Callable[[Any, Path, Count], list[str]] | None = None  # what is wrong, where reading does not tell
    published: Published | None = None
    files: str = "its files"  # what data.dir must hold


def find_place(folder: Path, names: Sequence[str], holds: Callable[[Path], bool]) -> Path | None:
    """The first that `holds`: `folder`, its subfolders of a known name, and theirs.

    A name is known whatever its case, and with or without - and _: CIFAR-10 is cifar10.
    """

    def named(parent: Path) -> Iterator[Path]:
        for path in sorted(parent.iterdir()):
            if path.is_dir() and path.name.lower().replace("-", "").replace("_", "") in names:
                yield path

    children = list(named(folder)) if folder.is_dir() else []
    places = (folder, *children, *(below for child in children for below in named(child)))
    return next((place for place in places if holds(place)), None)
