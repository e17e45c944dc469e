"""`lockstep train …` whose workers write what their steps take: seconds, memory, kept activations.

LOCKSTEP_WATCHED=FOLDER python benchmarks/watched_train.py train …
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lockstep.cli.main import main
from lockstep.lower.lane_by_lane import LaneByLane
from lockstep.train.step import Step

_STATUS = Path("/proc/self/status")


def watch(step: Any, *arguments: Any, inner: Any = Step.__call__, **options: Any) -> Any:
    """Run a step; the first one warms up, and its memory counts."""
    if not hasattr(step, "watched"):
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before is not there for the step
        step.watched, step.before = [], _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    start = time.perf_counter()
    result = inner(step, *arguments, **options)
    step.watched.append(time.perf_counter() - start)
    row = {
        "step_s": statistics.median(step.watched[1:] or step.watched),
        "peak_mb": (_status("VmHWM") - step.before) / 1000,
        "kept_mb": step._lowered.kept_mb,
    }
    Path(os.environ["LOCKSTEP_WATCHED"], f"worker-{os.getpid()}.json").write_text(json.dumps(row))
    return result


def count_kept(lowered: Any, *arguments: Any, inner: Any = LaneByLane._run_lane, **options: Any) -> Any:
    """Run a lane; what its forward pass keeps for the backward pass, each memory once, without parameters."""
    known = {parameter.untyped_storage().data_ptr() for parameter in lowered.model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in known:
            kept[memory.data_ptr()] = memory.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        output = inner(lowered, *arguments, **options)
    lowered.kept_mb = sum(kept.values()) / 1e6
    return output


def _status(key: str) -> float:
    """A value of this process, in kB."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{key}:"))
    return float(line.split()[1])


Step.__call__ = watch  # type: ignore[method-assign]
LaneByLane._run_lane = count_kept  # type: ignore[method-assign]
if __name__ == "__main__":
    main()
