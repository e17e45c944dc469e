"""Compares the traces and checkpoints of two runs, and finds the first common step that differs in a bit.

`tensor_difference.py` then finds the first tensor and element that differ at that step.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import BadInput, CheckpointError
from lockstep.runs import checkpoint
from lockstep.runs.checkpoint import Saved
from lockstep.runs.directory import RunDirectory
from lockstep.runs.resume import check_checkpoint
from lockstep.runs.tensor_difference import Located, in_order, locate
from lockstep.spec.identity import Identity, differences

_BOTH = "both need --trace, or a checkpoint of the same step: checkpoint.keep=N leaves the newest N"


@dataclass(frozen=True)
class Side:
    """One of the two runs, with everything that can be compared."""

    path: Path
    identity: Identity
    final_step: int | None  # None while the run is not finished
    checkpoints: dict[int, Path]
    trace: dict[int, bytes]  # rows by step, unparsed: a long trace would otherwise fill the memory

    @classmethod
    def read(cls, directory: RunDirectory) -> Side:
        """Read a run that may still be training: the summary first, because it is written last."""
        summary = directory.summary()
        return cls(
            directory.path,
            directory.identity(),
            None if summary is None else _final_step(directory.path, summary),
            checkpoint.checkpoint_steps(directory.checkpoints),
            read_trace(directory.path / "trace.jsonl"),
        )

    @property
    def last_step(self) -> int | None:
        """The newest step that is on disk."""
        return max((*self.checkpoints, *self.trace), default=None)

    def load(self, step: int) -> Saved | None:
        """Load a checkpoint; None if the run is still training and has removed it."""
        path = self.checkpoints[step]
        try:
            saved = checkpoint.load_checkpoint(path)
        except CheckpointError:
            if path.exists():
                raise
            return None
        check_checkpoint(saved, self.identity)
        return saved


@dataclass(frozen=True)
class Comparison:
    """The result of comparing two runs."""

    a: Side
    b: Side
    identity: list[str]  # one line for each field that differs
    traced: list[int]  # steps that both traces have
    checkpoints: list[int]  # steps whose checkpoints are equal
    last_equal: int | None
    first_different: int | None
    names: list[str]  # tensors that differ at that step
    by_trace: bool  # whether the traces showed that step, not the checkpoints
    located: Located | None  # the nearest common checkpoint at or after that step
    hashes: dict[str, str]  # of the newest checkpoint that is equal

    @property
    def other_length(self) -> bool:
        """Whether both are finished, but after different numbers of steps."""
        ends = self.a.final_step, self.b.final_step
        return None not in ends and ends[0] != ends[1]

    @property
    def identical(self) -> bool:
        """Whether no bit differs in the steps that both runs have reached."""
        return self.first_different is None and not self.other_length


def compare(a: Side, b: Side) -> Comparison:
    """Find the first common step that differs, in the traces and in the checkpoints."""
    traced = sorted(a.trace.keys() & b.trace.keys())
    first = next((step for step in traced if _trace_names(a, b, step)), None)
    equal, hashes, located = _walk(a, b, first)
    by_trace = first is not None and not (located and located.names and located.step < first)
    if not by_trace:
        first = located.step if located else None
    same = [step for step in (*traced, *equal) if first is None or step < first]
    if first is None:
        _check_enough(a, b, max(same, default=None))
    names = _trace_names(a, b, first) if by_trace and first is not None else []
    if located and not by_trace:
        names = located.names
    lines = _identity_lines(a, b)
    last = max(same, default=None)
    return Comparison(a, b, lines, traced, equal, last, first, names, by_trace, located, hashes)


def read_trace(path: Path) -> dict[int, bytes]:
    """The rows of a trace by step; a last line without a newline is still being written and is ignored."""
    rows = {}
    for number, row in enumerate(path.read_bytes().split(b"\n")[:-1] if path.is_file() else (), 1):
        try:
            step, tensors = _parse(row)
            if type(step) is not int or not all(isinstance(value, str) for value in tensors.values()):
                raise TypeError
        except (ValueError, KeyError, TypeError, AttributeError):
            raise BadInput(
                f"{path} line {number}: damaged: no row of a step and its tensors' hashes; remove the file "
                "to compare checkpoints alone"
            ) from None
        rows[step] = row  # a resumed run has its first step twice; the later row is valid
    return rows


def _walk(a: Side, b: Side, first: int | None) -> tuple[list[int], dict[str, str], Located | None]:
    """Compare common checkpoints in order, up to one that differs or is not before `first`.

    `first` is the first step at which the traces differ. Returns the equal steps, the hashes of the last of
    them, and the checkpoints at which the comparison stopped.
    """
    equal: list[int] = []
    hashes: dict[str, str] = {}
    wanted = "" if first is None else _trace_names(a, b, first)[0]
    for step in sorted(a.checkpoints.keys() & b.checkpoints.keys()):
        left, right = a.load(step), b.load(step)
        if left is None or right is None:
            continue
        located = locate(step, left.tensors, right.tensors, wanted)
        if located.names or (first is not None and step >= first):
            return equal, hashes, located
        equal.append(step)
        hashes = {key: value for key, value in left.manifest.items() if key.endswith("_sha256")}
    return equal, hashes, None


def _check_enough(a: Side, b: Side, last: int | None) -> None:
    """Refuse to call runs identical if they share no step, or if their common end cannot be compared."""
    for side in (a, b):
        if side.last_step is None:
            raise BadInput(f"{side.path}: it has neither a checkpoint nor a trace: nothing to compare")
    unfinished = None in (a.final_step, b.final_step)
    found = _identity_lines(a, b)
    if last == 0 and unfinished and found:
        raise BadInput(
            f"all that both runs kept is the state before step 1, and they are different runs: {found[0]}"
        )
    if last is None:
        why = f"they are different runs: {'; '.join(found[:2])}" if found else _BOTH
        raise BadInput(
            f"no step that both runs kept: A ({a.path}) has {_steps(a)}, B ({b.path}) {_steps(b)}; {why}"
        )
    if a.final_step is not None and a.final_step == b.final_step and last < a.final_step:
        raise BadInput(
            f"both runs are finished at step {a.final_step} and equal up to step {last}, but not both have "
            "a checkpoint of the end: it cannot be compared"
        )


def _final_step(path: Path, summary: dict[str, Any]) -> int:
    try:
        return int(summary["steps"])
    except (KeyError, ValueError, TypeError):
        raise BadInput(
            f"{path / 'summary.json'}: damaged: it does not say how many steps were done"
        ) from None


def _steps(side: Side) -> str:
    kept = sorted(side.checkpoints)
    shown = f"{'… ' if len(kept) > 4 else ''}{', '.join(map(str, kept[-4:]))}"
    return f"checkpoints of {shown or 'no step'} and {'a' if side.trace else 'no'} trace"


def _parse(row: bytes) -> tuple[int, dict[str, str]]:
    table = json.loads(row)
    return table["step"], table["tensors"]


def _trace_names(a: Side, b: Side, step: int) -> list[str]:
    """The tensors whose hashes differ between two traces at one step, in the state's order."""
    if a.trace[step] == b.trace[step]:
        return []
    (_, left), (_, right) = _parse(a.trace[step]), _parse(b.trace[step])
    return in_order(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))


def _identity_lines(a: Side, b: Side) -> list[str]:
    return differences(a.identity, b.identity, ("in A", "in B"))
