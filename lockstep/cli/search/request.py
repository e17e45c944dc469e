"""The flags of `lockstep sweep` become a Sweep; its directory is made, or found and gone on with."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import BadInput, SpecError
from lockstep.spec import Launch
from lockstep.spec.run_file import parse_value, read_toml
from lockstep.spec.search.sweep import Sweep
from lockstep.spec.search.value_list import read_range, split_values

if TYPE_CHECKING:
    from lockstep.runs.directory import RunDirectory

FILE = "sweep.json"
_RUNGS, _KEEP = 3, 0.5


def read_request(options: argparse.Namespace) -> Sweep:
    """What the command line asks for."""
    choices, ranges, singles = dict[str, tuple[Any, ...]](), dict[str, tuple[float, float]](), list[str]()
    for item in options.override:
        key, equals, text = (part.strip() for part in item.partition("="))
        texts = split_values(key, text)
        ends = read_range(key, text)
        if not equals or (len(texts) == 1 and not ends):
            singles.append(item)
            continue
        if key in choices or key in ranges or any(_key(each) == key for each in singles):
            raise SpecError(f"-o {item}: {key} is given twice: give all of its values with commas, once")
        if ends:
            ranges[key] = ends
        else:
            choices[key] = tuple(map(parse_value, texts))
    for item in singles:
        if _key(item) in (*choices, *ranges):
            raise SpecError(
                f"-o {item}: {_key(item)} is given twice: give all of its values with commas, once"
            )
    file = read_toml(options.config) if options.config else {}
    asked = (options.recipe, file, tuple(singles), choices, ranges, _read_seeds(options.seeds))
    return Sweep(*asked, **_read_search(options))


def _key(item: str) -> str:
    return item.partition("=")[0].strip()


def _read_seeds(text: str | None) -> tuple[int, ...]:
    words = text.split(",") if text is not None else []
    if not all(word.strip().isdecimal() for word in words):
        raise BadInput(f"--seeds {text} must be whole numbers from 0 with commas, as 0,1,2")
    return tuple(map(int, words))


def _read_search(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of a Sweep that say how it searches."""
    search, draws = options.search, options.search == "random" or options.samples is not None
    if search == "grid" and options.samples is not None:
        raise BadInput(f"--samples {options.samples} is for --search random: the grid has all combinations")
    if search == "random" and options.samples is None:
        raise BadInput("--search random needs --samples N: how many combinations are drawn")
    if options.samples is not None and options.samples < 1:
        raise BadInput(f"--samples {options.samples} must be 1 or more")
    if options.seed is not None and not draws:
        raise BadInput(
            f"--seed {options.seed} is for combinations that are drawn (--search random): for runs with "
            "other seeds give --seeds"
        )
    found = {"search": search, "samples": options.samples or 0, "seed": options.seed or 0}
    if search != "halving":
        for flag, value in (("--rungs", options.rungs), ("--keep", options.keep)):
            if value is not None:
                raise BadInput(f"{flag} {value} is for --search halving: leave it out")
        return found
    rungs, keep = options.rungs or _RUNGS, _KEEP if options.keep is None else options.keep
    if rungs < 2:
        raise BadInput(
            f"--rungs {rungs} must be 2 or more: runs are compared at the end of each but the last"
        )
    if not 0 < keep < 1:
        raise BadInput(f"--keep {keep:g} must be above 0 and below 1: the share of runs that goes on")
    return found | {"rungs": rungs, "keep": keep}


def find_folder(options: argparse.Namespace) -> Path:
    """The sweep's directory, which may not be there yet."""
    base = options.recipe or (options.config.stem if options.config else "shapes")
    name = Launch(name=options.name or f"{base}-sweep").name  # a bad one is refused
    return Path(options.runs_dir, str(name))


def find_earlier(folder: Path, sweep: Sweep) -> Sweep:
    """This sweep, with its keys in the order in which it was begun; refused if it is another one."""
    if not folder.exists():
        return sweep
    try:
        earlier = Sweep.from_json((folder / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        what = f"{folder} is there, and is no sweep (it has no {FILE})"
        raise BadInput(f"--name {folder.name}: {what}: give another --name") from None
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(f"{folder / FILE}: cannot be read: {error}") from None
    sweep.check_extends(earlier, str(folder))
    choices = {key: sweep.choices[key] for key in earlier.choices}
    return replace(sweep, choices=choices, ranges={key: sweep.ranges[key] for key in earlier.ranges})


def open_folder(folder: Path, sweep: Sweep) -> RunDirectory:
    """Make and lock the sweep's directory, and write what is asked."""
    from lockstep.runs.checkpoint import write_durably
    from lockstep.runs.directory import RunDirectory

    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = RunDirectory(folder)
        held.hold()
        write_durably(folder / FILE, sweep.to_json().encode())
    except OSError as error:
        raise BadInput(f"{folder}: cannot be written: {error.strerror or error}") from None
    return held
