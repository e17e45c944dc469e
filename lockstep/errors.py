"""Every error a user can meet, in one class tree; imports nothing else of Lockstep.

LockstepError                 exit 1: the run failed
├── BadInput                  exit 2: found before any work started
│   ├── SpecError             a key, type or value of a Run
│   ├── ModelError            an unknown model, a size it cannot take, weights that do not fit
│   ├── DataError             data that is missing, truncated, mislabelled or unreadable
│   └── IdentityError         a checkpoint of another run
├── FetchError                a data set that could not be fetched
├── CheckpointError           no checkpoint that can be read
├── NumericsError             a loss or a gradient that is not finite
├── OutOfMemory               a lane does not fit
├── GroupLost                 a worker ended or cannot be reached
├── WorkersDiffer             workers that would not train to the same bits
├── AuditFailed               a lane that two workers computed, to different bits
├── NotSaved                  a run is trained, but not all of it is on disk
├── Paused                    exit 0: stopped after as many epochs as asked, after saving
└── Interrupted               exit 130, 138 or 143: stopped by SIGINT, SIGUSR1 or SIGTERM, after saving
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LockstepError(Exception):
    """The root: one line that names the field, its value, the rule and the fix."""

    exit_code = 1
    everywhere = False  # whether every worker raises it, so that worker 0 speaks for all
    rank = 0  # of the worker that raises it


class BadInput(LockstepError):
    """What the user gave cannot work; raised before any work starts."""

    exit_code = 2


class SpecError(BadInput):
    """A key, a type or a value of a Run is wrong."""


class ModelError(BadInput):
    """The model is unknown, or cannot be built or loaded as asked."""


class DataError(BadInput):
    """The data is missing, truncated, mislabelled or unreadable."""


class IdentityError(BadInput):
    """The checkpoint belongs to a run of another identity."""


class FetchError(LockstepError):
    """A published data set could not be fetched, or came wrong."""


class CheckpointError(LockstepError):
    """There is no checkpoint that can be read."""


class NumericsError(LockstepError):
    """A loss or a gradient is not finite."""

    everywhere = True


class OutOfMemory(LockstepError):
    """A lane's work does not fit into memory."""


class GroupLost(LockstepError):
    """Another worker ended, or cannot be reached."""


class WorkersDiffer(LockstepError):
    """The workers of a group would not train, or did not train, to the same bits."""

    everywhere = True


class AuditFailed(LockstepError):
    """Two workers computed a lane to different bits."""

    everywhere = True


class NotSaved(LockstepError):
    """The run is trained, but its last state or its summary could not be written; `result` has both."""

    everywhere = True

    def __init__(self, message: str, result: object) -> None:
        super().__init__(message)
        self.result = result


class Paused(LockstepError):
    """The run was asked to stop after some of its epochs; its state is saved."""

    everywhere = True
    exit_code = 0


class Interrupted(LockstepError):
    """A signal stopped the run after its state was saved."""

    everywhere = True

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


def unknown(what: str, value: str, choices: Iterable[str]) -> str:
    """One line for a name that does not exist: the nearest right one, then all of them."""
    known = sorted(choices)
    near = difflib.get_close_matches(value, known, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return f"unknown {what} '{value}': {hint}choose from {', '.join(known)}"
