"""`lockstep verify`: prints whether two runs are the same, bit for bit, and where they first differ."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lockstep.cli.flag import add_json, add_runs_dir
from lockstep.errors import BadInput, CheckpointError

if TYPE_CHECKING:
    from lockstep.runs.compare import Comparison, Side
    from lockstep.runs.tensor_difference import Element, Located

    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

_PARTS = {
    "weights_sha256": "weights",
    "optimizer_sha256": "optimizer",
    "ema_sha256": "averaged weights",
    "feedback_sha256": "what compression left out",
}


def add_parser(verbs: Verbs) -> None:
    """Add the verb and its flags."""
    text = "compare two runs bit for bit"
    more = (
        "Exit code 0: identical, as far as both have come; 1: different; 2: not comparable. Writes nothing."
    )
    parser = verbs.add_parser("verify", help=text, description=f"{text.capitalize()}. {more}")
    parser.add_argument("run_a", metavar="RUN_A", help="a run's name or directory")
    parser.add_argument("run_b", metavar="RUN_B", help="another, which may still be training")
    add_runs_dir(parser)
    add_json(parser)
    parser.set_defaults(handler=verify)


def verify(options: argparse.Namespace) -> int:
    """Compare and print what was found."""
    from lockstep.runs.compare import Side, compare
    from lockstep.runs.directory import RunDirectory

    try:
        a, b = (Side.read(RunDirectory.find(options.runs_dir, run)) for run in (options.run_a, options.run_b))
        found = compare(a, b)
    # Exit code 1 means that the runs differ, so a file that cannot be read must end with 2.
    except CheckpointError as error:
        raise BadInput(str(error)) from None
    except OSError as error:
        raise BadInput(f"{error.filename}: cannot be read: {error.strerror}") from None
    print(json.dumps(_table(found)) if options.json else "\n".join(_lines(found)))
    return 0 if found.identical else 1


def _lines(found: Comparison) -> Iterator[str]:
    """The result as text for a person."""
    yield _verdict(found)
    yield f"  A: {_describe(found.a)}"
    yield f"  B: {_describe(found.b)}"
    if found.first_different is None:
        yield f"  compared: {_compared(found)}"
    else:
        yield from _difference(found, found.first_different)
    for line in found.identity or ["same identity"]:
        yield f"  identity: {line}" if found.identity else f"  {line}"


def _verdict(found: Comparison) -> str:
    first, last = found.first_different, found.last_equal
    if found.identical:
        partly = "" if _complete(found) else f" up to step {last}"
        if not found.checkpoints:
            return f"identical{partly}: by their traces"
        weights, step = found.hashes["weights_sha256"], found.checkpoints[-1]
        return f"identical{partly}: weights_sha256 {weights} (step {step})"
    if first is None:
        return (
            f"different: A ends at step {found.a.final_step}, B at step {found.b.final_step}; "
            f"last equal at step {last}"
        )
    source = "by their traces" if found.by_trace else "by their checkpoints"
    before = "no earlier common step" if last is None else f"last equal at step {last}"
    return f"different: first at step {first}, {before if first else 'the very first state'} ({source})"


def _complete(found: Comparison) -> bool:
    return found.last_equal == found.a.final_step == found.b.final_step


def _describe(side: Side) -> str:
    if side.final_step is not None:
        return f"{side.path}, finished at step {side.final_step}"
    return f"{side.path}, unfinished, on disk up to step {side.last_step}"


def _compared(found: Comparison) -> str:
    """The checkpoints and traces that were found equal."""
    parts = []
    if found.checkpoints:
        steps = ", ".join(map(str, found.checkpoints[:-1]))
        state = ", ".join(text for key, text in _PARTS.items() if key in found.hashes)
        parts.append(
            f"{state} of step {found.checkpoints[-1]}" + (f", checkpoints of {steps}" if steps else "")
        )
    if found.traced:
        parts.append(f"traces of {len(found.traced)} steps, {found.traced[0]} to {found.traced[-1]}")
    return "; ".join(parts)


def _difference(found: Comparison, first: int) -> Iterator[str]:
    """Describe the first step that differs: its tensors, then one element."""
    count = f"first of {len(found.names)}" if len(found.names) > 1 else "the only one"
    yield f"  tensor: {found.names[0]}, {count} to differ at step {first}"
    if found.located is None:
        yield f"  element: the runs have no common checkpoint at or after step {first}"
    elif not found.located.names:
        yield f"  element: the checkpoints of step {found.located.step} are equal again"
    else:
        yield from _locate(found.located)
    if found.by_trace:
        return
    if first in found.traced:
        yield f"  note: the traces of step {first} are equal: a checkpoint was changed after it was traced"
    elif first and found.last_equal != first - 1:
        yield "  hint: only kept checkpoints were compared; train both with --trace to find the exact step"


def _locate(located: Located) -> Iterator[str]:
    """Describe how one tensor differs between two checkpoints."""
    where = f"in the checkpoints of step {located.step}"
    tensors = f"{len(located.names)} of {located.num_tensors} tensors differ"
    if located.element is None:
        a, b = (form or "absent" for form in located.forms)
        yield f"  form: {where}, {located.name} is {a} in A, {b} in B"
        yield f"  extent: {tensors}"
        return
    (a, b), (bits_a, bits_b) = located.element.values, located.element.bits
    index = f"[{', '.join(map(str, located.element.index))}]"
    yield f"  element: {where}, {located.name}{index} is"
    yield f"    {a} ({bits_a}) in A, {b} ({bits_b}) in B: {_distance(located.element)}"
    yield f"  extent: {located.num_different} of {located.num_elements} elements of this tensor; {tensors}"


def _distance(element: Element) -> str:
    if element.ulps is not None:
        return f"{element.ulps} ulp apart" + ("" if element.ulps else " (the sign of zero)")
    if element.difference is not None:
        return f"difference {element.difference:+d}"
    return "no distance (NaN)" if "nan" in element.values else "no distance in this type"


def _table(found: Comparison) -> dict[str, Any]:
    """The result as a table for --json."""
    return {
        "identical": found.identical,
        "complete": _complete(found),
        "a": _side(found.a),
        "b": _side(found.b),
        "identity": found.identity,
        "equal_checkpoints": found.checkpoints,
        "num_traced": len(found.traced),
        "last_equal_step": found.last_equal,
        "first_different_step": found.first_different,
        "found_by": None if found.first_different is None else "trace" if found.by_trace else "checkpoint",
        "tensor": found.names[0] if found.names else None,
        "num_tensors": len(found.names),
        "checkpoint": asdict(found.located) if found.located else None,
        "equal_state": {"step": found.checkpoints[-1], **found.hashes} if found.checkpoints else None,
    }


def _side(side: Side) -> dict[str, Any]:
    return {
        "run": str(side.path),
        "finished": side.final_step is not None,
        "last_step": side.last_step,
        "traced": bool(side.trace),
    }
