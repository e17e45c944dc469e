"""The command that a worker runs: that of the process which starts it, or a script."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import SpecError
from lockstep.spec.world import STARTED_IN

_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")  # Python's flags that take a value


@dataclass(frozen=True)
class WorkerCommand:
    """The command of this process: Python's flags, then a script or a module with its arguments."""

    flags: list[str]
    module: str
    argv: list[str]


def script_command(words: list[str]) -> WorkerCommand:
    """The command of a script, given by its path and its arguments."""
    script = Path(STARTED_IN, words[0])
    if not script.is_file():
        raise SpecError(f"{words[0]}: no such script: give the path of a Python file, then its arguments")
    return WorkerCommand([], "", [str(script), *words[1:]])


def own_command() -> WorkerCommand:
    """The command that started this process, for its workers; sys.argv may have been changed by now."""
    words = iter(sys.orig_argv[1:])
    flags: list[str] = []
    for word in words:
        if word == "-m" or (word.startswith("-m") and not word.startswith("--")):
            module = word[2:] or next(words)
            return WorkerCommand(flags, module, [module, *words])
        if word in ("-c", "-"):
            break
        if not word.startswith("-"):
            script = Path(STARTED_IN, word)
            if script.exists():
                return WorkerCommand(flags, "", [str(script), *words])
            break
        flags.append(word)
        if word in _WITH_VALUE:
            flags.append(next(words))
    raise SpecError("several workers run copies of a script, and this code is not in a file: save it in one")
