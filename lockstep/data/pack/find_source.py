"""Finds out what a SOURCE is, and packs it; also `lockstep.pack`, which packs a data set in Python.

Everything else is imported when it is used, since `import lockstep` imports this file.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.data.catalog import data_names, make_options, open_store
from lockstep.errors import DataError

if TYPE_CHECKING:
    from lockstep.data.pack.packable import Packable
    from lockstep.data.pack.write_pack import PackResult

_NOT_PACKED = ("folder", "csv", "pack")  # names that stand for a path


def pack_data(
    data: Any,
    dest: str | Path,
    *,
    raw: bool = False,
    size: int = 0,
    quality: int = 90,
    shard_mb: float = 256,
    skip_bad: bool = False,
) -> PackResult:
    """Pack `data` into the new folder `dest`: a data set or a pair, as `train` takes it, or a SOURCE's name.

    Images are kept as they are (pixels as PNG); with `size` they become JPEG files whose shorter side has so
    many pixels, with `raw` an array of pixels. Interrupted, the same call goes on.
    """
    from lockstep.data.pack.from_store import pack_store
    from lockstep.data.pack.image_form import ImageForm
    from lockstep.data.pack.write_pack import PackPlan, check_dest, write_pack

    check_dest(Path(dest))
    source = find_source(str(data), {}) if isinstance(data, str | Path) else pack_store(data)
    form = ImageForm("raw" if raw else "jpeg" if size else "files", size, quality)
    result = write_pack(source, Path(dest), PackPlan(form, shard_mb, skip_bad=skip_bad))
    if not result.is_done:
        raise DataError(f"{bad_images(result, Path(dest))}; the first is {result.bad[0]}")
    return result


def bad_images(result: PackResult, dest: Path) -> str:
    """What to do about bad images that were not skipped."""
    return (
        f"{len(result.bad):,} bad images, so there is no pack: leave them out with --skip-bad, which goes on "
        f"(skip_bad=True); or repair or remove them, remove {dest}.part, and run again"
    )


def find_source(name: str, options: Mapping[str, Any], classes: Path | None = None) -> Packable:
    """What a SOURCE names: a published set, or a path: a folder of images, tar shards or Parquet files.

    `options` are keys of data; `classes` is a file of class names, for sources that have only numbers.
    """
    keys = dict(options)
    if name in data_names() and name not in _NOT_PACKED:
        from lockstep.data.pack.from_store import pack_store

        dir = keys.pop("dir", None)
        return pack_store(open_store(name, Path(dir) if dir else None, keys))
    path = Path(name)
    if not path.exists() and not any(letter in name for letter in "*?["):
        known = ", ".join(each for each in data_names() if each not in _NOT_PACKED)
        raise DataError(f"{name}: no such folder or file, and no published set ({known}): name a SOURCE")
    files = sorted(path.iterdir()) if path.is_dir() else [path] if path.exists() else _glob(name)
    for suffix in (".tar", ".parquet"):
        found = [file for file in files if file.suffix == suffix and file.is_file()]
        if found:
            if keys:
                raise DataError(f"-o data.{next(iter(keys))}: {suffix} files have no such key: leave it out")
            return _from_files(found, classes)
    if not path.is_dir():
        raise DataError(f"{name}: is no folder, and names no .tar or .parquet file: name a SOURCE")
    from lockstep.data.pack.from_folder import pack_folder

    return pack_folder(make_options("folder", keys), path)


def _from_files(files: list[Path], classes: Path | None) -> Packable:
    from lockstep.data.pack.pack_facts import read_facts

    names = None
    if (files[0].parent / "pack.json").is_file():  # a pack of ours, whose classes have names
        names = read_facts(files[0].parent).classes
    if classes:
        try:
            names = tuple(classes.read_text(encoding="utf-8").splitlines())
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"--classes {classes}: cannot be read ({error}): one name a line") from error
    if files[0].suffix == ".tar":
        from lockstep.data.pack.from_tar import pack_tars

        return pack_tars(files, names)
    from lockstep.data.pack.from_parquet import pack_parquet

    return pack_parquet(files, names)


def _glob(pattern: str) -> list[Path]:
    return sorted(map(Path, glob.glob(pattern)))  # noqa: PTH207 - the pattern may be absolute
