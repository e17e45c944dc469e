"""The outcomes of `lockstep bench baselines` as a table and as records."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lockstep.lab.baselines.baseline_task import BaselineTask
from lockstep.lab.baselines.contest import Outcome

_START = {"fp32": 1e-4, "tf32": 3e-3, "bf16": 3e-3}  # how far first losses may lie apart, relatively
_SEQUENTIAL = "sequential C++"
_HEAD = (
    "start-up   training   speedup       img/s  first loss   last loss  accuracy    one image      a batch"
)


def find_strays(found: Mapping[str, Outcome]) -> list[str]:
    """A line for everyone whose first loss is not that of the first with the same precision."""
    lines, first = list[str](), dict[str, float]()
    for name, each in found.items():
        wanted = first.setdefault(each.precision, each.first_loss)
        if not abs(each.first_loss - wanted) <= _START[each.precision] * abs(wanted):
            lines.append(
                f"{name} starts with loss {each.first_loss:.6f}, others in {each.precision} with {wanted:.6f}"
            )
    return lines


def tell_baselines(found: Mapping[str, Outcome], task: BaselineTask, share: Mapping[str, float]) -> list[str]:
    """A row for every contestant."""
    where = "a GPU" if task.device == "cuda" else "a CPU"
    epochs = f"{task.epochs} epoch{'s' * (task.epochs > 1)}"
    run = f"{epochs} of {task.images} images, batch {task.batch}, SGD with rate {task.rate:g}"
    lines = [f"emotion48 on {where}: {run}"]
    if not found:
        return [*lines, "none of the contestants could start"]
    width, (base, first) = max(map(len, found)), next(iter(found.items()))
    lines.append(f"  {'':{width}}       {_HEAD}")
    for name, each in found.items():
        lines.append(
            f"  {name:{width}}  {each.precision}  {each.startup_s:7.1f} s  {each.train_s:7.2f} s"
            f"  {first.train_s / each.train_s:6.2f} x  {_count(task) / each.train_s:10,.0f}"
            f"  {each.first_loss:10.6f}  {each.last_loss:10.6f}  {100 * each.accuracy:6.2f} %"
            f"  {_ms(each.infer_one_s)}  {_ms(each.infer_batch_s)}"
        )
    same = "all" if not find_strays(found) else "not all"
    lines += [
        f"speedup over {base}; first loss is that of the first step, last loss the mean of the last epoch",
        f"{same} start with the loss of the others in their precision",
    ]
    hashes = [each.weights_sha256 for each in found.values() if each.weights_sha256]
    if len(hashes) > 1:
        same = "the same bits" if len(set(hashes)) == 1 else "NOT the same bits"
        lines.append(f"Lockstep ends with {same} on any number of cores: {hashes[0][:16]}")
    if share:
        lines.append(
            f"sequential C++ computes {share['gflop_s']:.1f} GFLOP/s, multiply-adds of its compiler alone "
            f"{share['limit_gflop_s']:.1f}: so it takes {share['times_the_least']:.2f} x the least time"
        )
    return lines


def measure_share(found: Mapping[str, Outcome], task: BaselineTask) -> dict[str, float]:
    """How near the sequential program is to what its compiler can do; nothing if it did not run."""
    from lockstep.lab.baselines.cpp_network import OPERATIONS, measure_limit

    cpp = next((each for name, each in found.items() if name.startswith(_SEQUENTIAL)), None)
    if cpp is None:
        return {}
    rate, limit = _count(task) * OPERATIONS / cpp.train_s, measure_limit()
    return {"gflop_s": rate / 1e9, "limit_gflop_s": limit / 1e9, "times_the_least": limit / rate}


def records_of(
    found: Mapping[str, Outcome], task: BaselineTask, share: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Every outcome as a record; its value is the time of training."""
    from lockstep.lab.lab_record import make_lab_record

    command, sizes = " ".join(["lockstep", *sys.argv[1:]]), asdict(task)
    del sizes["folder"], sizes["precision"]
    sizes["most_cores"] = sizes.pop("cores")
    own = {name: share if name.startswith(_SEQUENTIAL) else {} for name in found}
    return [
        asdict(
            make_lab_record(
                f"baselines: {name}", [each.train_s], command, **sizes, **asdict(each), **own[name]
            )
        )
        for name, each in found.items()
    ]


def _count(task: BaselineTask) -> int:
    """Images of all steps."""
    return task.epochs * (task.images // task.batch) * task.batch


def _ms(seconds: float | None) -> str:
    return f"{1e3 * seconds:8.2f} ms" if seconds is not None else f"{'–':>11}"
