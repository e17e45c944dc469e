"""`DataSet`: what a data set's own file defines: its options, how it is opened, where it is published.

Each data set's file puts its definitions into DATA_SETS, where `catalog` finds them. A Run's `[data]`,
`lockstep data` and `lockstep doctor` work with any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.data.fetch import Published
from lockstep.data.store import Store

Count = Callable[[int, int], None]  # (done, total)


@dataclass(frozen=True)
class DataSet:
    """One data set; it has either `generate` or `read`, which reads it from a folder."""

    name: str
    options: type  # a dataclass of what a user may set under `data.`
    generate: Callable[[Any], Store] | None = None  # from its options
    read: Callable[[Any, Path], Store] | None = None
    find: Callable[[Path], Path | None] | None = None  # finds its files at or below a folder
    check: Callable[[Any, Path, Count], list[str]] | None = None  # lists bad files; None: `read` finds them
    published: Published | None = None
    files: str = "its files"  # for the error message "set data.dir to …"


def find_place(folder: Path, names: Sequence[str], holds: Callable[[Path], bool]) -> Path | None:
    """The first folder that `holds` accepts: `folder`, its subfolders called one of `names`, or theirs.

    Names are compared without case, - and _: CIFAR-10 is cifar10.
    """

    def named(parent: Path) -> Iterator[Path]:
        for path in sorted(parent.iterdir()):
            if path.is_dir() and path.name.lower().replace("-", "").replace("_", "") in names:
                yield path

    children = list(named(folder)) if folder.is_dir() else []
    places = (folder, *children, *(below for child in children for below in named(child)))
    return next((place for place in places if holds(place)), None)
