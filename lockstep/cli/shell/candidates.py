"""What may come next on a command line, read from the parser, the keys of a Run and the folder of runs."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from lockstep.recipes import RECIPES
from lockstep.spec import Run
from lockstep.spec.identity import flatten
from lockstep.spec.run_file import to_table

_MANY = ("*", "+", argparse.REMAINDER)


def find_candidates(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """What the last of `words`, typed in part or empty, may become; nothing where a shell offers files."""
    *before, now = words
    places = _positionals(parser)
    flag: argparse.Action | None = None  # whose value comes next
    folder, used = "runs", set()
    for word in before:
        if flag and flag.nargs not in _MANY:
            folder = word if "--runs-dir" in flag.option_strings else folder
            flag = None
        elif word.startswith("-") and len(word) > 1:
            name, _, given = word.partition("=")
            flag = parser._option_string_actions.get(name)
            used |= {flag} if flag else set()
            folder = given if name == "--runs-dir" and given else folder
            flag = None if given or not flag or flag.nargs == 0 else flag
        elif flag:
            pass  # one more of its values
        elif places and isinstance(places[0], argparse._SubParsersAction):
            if word not in places[0].choices:
                return []
            parser = places[0].choices[word]
            places, used = _positionals(parser), set()
        elif places and places[0].nargs not in _MANY:
            places = places[1:]
    if flag and not (now.startswith("-") and flag.nargs in _MANY):
        found = _values(flag, folder)
    elif now.startswith("-"):
        spare = [action for action in parser._actions if action not in used or _is_repeated(action)]
        found = [text for action in spare for text in action.option_strings]
    else:
        found = _values(places[0], folder) if places else []
    return sorted({text for text in found if text.startswith(now)})


def _positionals(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if not action.option_strings]


def _is_repeated(action: argparse.Action) -> bool:
    return isinstance(action, argparse._AppendAction)


def _values(action: argparse.Action, folder: str) -> Iterable[str]:
    """The values of a flag or argument: its choices, or what its metavar names, such as auto|RUN|PATH."""
    if action.choices is not None:
        return map(str, action.choices)
    shown = action.metavar if isinstance(action.metavar, str) else ""
    found: list[str] = []
    for part in shown.split("|"):
        if part.islower():
            found.append(part)
        elif part.partition("_")[0] == "RUN":
            found += _runs(Path(folder))
        elif part == "RECIPE":
            found += RECIPES
        elif part == "KEY=VALUE":
            found += (f"{key}=" for key in flatten("", to_table(Run())))
    return found


def _runs(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir() if (path / "identity.json").is_file()]
    except OSError:
        return []
