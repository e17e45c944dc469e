"""`lockstep bench threads`: the same training by more and more threads or workers, with the same bits."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.flag import add_device, add_json, check_new_file
from lockstep.cli.lab.clean_end import end_cleanly
from lockstep.errors import BadInput, LockstepError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from lockstep.lab.threads.threads_bench import Pictures, Scaled, SkippedCount
    from lockstep.spec import Record

BENCH_THREADS = """\
Train emotion48 by 1, 2, 4 … threads of a GPU, in kernels where each result is computed by one thread in one
fixed order, and see that time falls while no bit changes:

  lockstep bench threads                            as many threads as the GPU can use
  lockstep bench threads --most 4096 --picture threads.png
  lockstep bench threads --device cpu               1, 2, 4, 8 workers of `lockstep train`, and 2 threads

Each number of threads does some steps of 8 images; from 1024 on whole training, too. The kernels are under
lockstep/lab/threads/cuda. Without a GPU it is workers: real trainings, and one hash of their weights.
"""
FINDING = "The paper that this repeats found accuracy and loss equal at 1 … 32768 threads of a GPU."
_MOST_GPU, _LIMIT_GPU = 1 << 18, 1 << 22
_MOST = {"most": _LIMIT_GPU, "steps": 1000, "epochs": 1000}
_PATIENCE_S, _BUDGET_S = 120.0, 90.0
_TRAIN_IMAGES, _TEST_IMAGES, _SIDE, _CLASSES = 4096, 1024, 48, 7


def add_threads(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench threads`."""
    add_device(parser)
    parser.add_argument(
        "--most",
        type=int,
        metavar="T",
        help=f"threads of a GPU, default {_MOST_GPU}; workers and threads of a CPU, default 8",
    )
    parser.add_argument("--steps", type=int, metavar="N", help="of 8 images, on a GPU; default: 3")
    parser.add_argument("--epochs", type=int, metavar="N", help="of training; default: 4 on a GPU, else 2")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw time by threads")
    add_json(parser)


def show_threads(options: argparse.Namespace) -> int:
    """Measure, print tables, draw if asked; 1 if the bits differ where they must not."""
    from lockstep.kernels.numerics import plain_torch, prepare_device
    from lockstep.lab.threads.threads_bench import Scaled

    if options.picture:
        check_new_file(options.picture, "--picture")
    for flag, most in _MOST.items():
        value = getattr(options, flag)
        if value is not None and not 1 <= value <= most:
            raise BadInput(f"--{flag} {value} must be from 1 to {most}")
    found = list[Scaled]()
    with end_cleanly(), plain_torch():
        device = prepare_device(options.device, 1)
        for each in _measure(options, device):
            if isinstance(each, Scaled):
                found.append(each)
                _say(f"{each.kind}: {each.count} done in {sum(each.seconds):.3g} s")
            else:
                _say(f"left out: {each.kind}: {each.count}: {each.why}")
    if not found:
        raise LockstepError("bench threads: nothing could be measured")
    found.sort(key=lambda each: (_kinds().index(each.kind), each.count))
    if options.json:
        print(json.dumps([asdict(record) for record in scaled_records(found, device.type)], indent=1))
    else:
        print("\n".join([*tell_scaled(found), FINDING]))
    if options.picture:
        from lockstep.report.thread_picture import draw_threads

        curves = {kind: [(each.count, _ms(each)) for each in rows] for kind, rows in _groups(found).items()}
        what = "threads of the GPU" if device.type == "cuda" else "workers, or threads of one worker"
        draw_threads(options.picture, what, curves, [*_verdicts(found), FINDING])
        _say(f"drew {options.picture}")
    return int(any(len(hashes) > 1 for kind, hashes in _hashes(found).items() if kind != _kinds()[-1]))


def _measure(options: argparse.Namespace, device: torch.device) -> Iterator[Scaled | SkippedCount]:
    if device.type == "cuda":
        return _by_threads(options, device)
    from lockstep.cli.lab.worker_runs import MOST_WORKERS, measure_workers

    if options.steps is not None:
        raise BadInput(
            f"--steps {options.steps} is for a GPU: leave it out on a CPU, which trains by --epochs"
        )
    most = options.most or MOST_WORKERS
    if most > MOST_WORKERS:
        raise BadInput(f"--most {most}: on a CPU at most {MOST_WORKERS} workers, one for each lane")
    return measure_workers(most, options.epochs or 2, _BUDGET_S)


def _by_threads(options: argparse.Namespace, device: torch.device) -> Iterator[Scaled | SkippedCount]:
    from lockstep.lab.threads.threads_bench import ThreadWork, measure_threads
    from lockstep.models import build_model
    from lockstep.spec import Model, Run

    most = options.most or _MOST_GPU
    model = build_model(Run(model=Model(name="emotion48")), (1, _SIDE, _SIDE), _CLASSES)
    train, test = _draw("train", _TRAIN_IMAGES, device), _draw("test", _TEST_IMAGES, device)
    counts = [1 << power for power in range(most.bit_length())]
    work = ThreadWork(model.state_dict(), train, test, options.steps or 3, options.epochs or 4, _PATIENCE_S)
    return measure_threads(device, counts, work)


def _draw(part: str, number: int, device: torch.device) -> Pictures:
    """Pictures of the data set `shapes`, with about mean 0 and deviation 1."""
    import torch

    from lockstep.data.shapes import DrawnSplit, ShapesOptions
    from lockstep.lab.threads.threads_bench import Pictures

    drawn = DrawnSplit(ShapesOptions(size=_SIDE, classes=_CLASSES), part, number)
    images, labels = drawn.read(torch.arange(number))
    return Pictures(((images.float() / 255 - 0.46) / 0.22).to(device), labels.to(device))


def tell_scaled(found: list[Scaled]) -> list[str]:
    """A table for each kind of run, and whether its bits are the same in all rows."""
    from lockstep.cli.lab.worker_runs import WORKERS

    lines, verdicts = list[str](), _verdicts(found)
    for (kind, rows), verdict in zip(_groups(found).items(), verdicts, strict=True):
        lines.append(f"emotion48, fp32, {kind}")
        what = "workers" if kind == WORKERS else "threads"
        lines.append(
            f"  {what}         time     images/s   speedup  efficiency  accuracy  loss         weights"
        )
        for each in rows:
            speedup, efficiency = _gain(each, found[0])
            accuracy = "" if each.accuracy is None else f"{100 * each.accuracy:.2f} %"
            lines.append(
                f"  {each.count:7}  {statistics.median(each.seconds):9.4g} s  {1e3 / _ms(each):11,.1f}  "
                f"{speedup:8.2f}  {100 * efficiency:8.3g} %  {accuracy:>8}  {each.loss:.9f}  "
                f"{each.weights_sha256[:12]}"
            )
        lines.append(f"  {verdict}")
    return [*lines, f"Speedup: images a second, over those of the first row ({found[0].count})."]


def _verdicts(found: list[Scaled]) -> list[str]:
    """For each kind of run, whether all counts gave the same weights."""
    lines = list[str]()
    for kind, hashes in _hashes(found).items():
        counts = [each.count for each in found if each.kind == kind]
        if len(counts) == 1:
            lines.append(f"{kind}: one run, nothing to compare")
        elif len(hashes) == 1:
            lines.append(
                f"{kind}: one hash at all {len(counts)} counts, {counts[0]} to {counts[-1]}: {hashes[0]}"
            )
        elif kind == _kinds()[-1]:
            lines.append(f"{kind}: other bits, so their number (train.threads) is part of a run's identity")
        else:
            lines.append(f"{kind}: {len(hashes)} DIFFERENT hashes; there must be one")
    return lines


def scaled_records(found: list[Scaled], device: str) -> list[Record]:
    """Every row as a record."""
    from lockstep.lab.lab_record import make_lab_record

    command = " ".join(["lockstep", *sys.argv[1:]])
    records: list[Record] = []
    for each in found:
        speedup, efficiency = _gain(each, found[0])
        details = {"model": "emotion48", "kind": each.kind, "count": each.count, "images": each.images}
        details |= {"speedup": speedup, "efficiency": efficiency, "loss": each.loss}
        details |= {"accuracy": each.accuracy, "weights_sha256": each.weights_sha256}
        name = f"{each.kind}, emotion48, fp32, {device}, {each.count}"
        records.append(make_lab_record(name, each.seconds, command, **details))
    return records


def _gain(each: Scaled, first: Scaled) -> tuple[float, float]:
    speedup = _ms(first) / _ms(each)
    return speedup, speedup * first.count / each.count


def _ms(each: Scaled) -> float:
    """Milliseconds for an image."""
    return 1e3 * statistics.median(each.seconds) / each.images


def _groups(found: list[Scaled]) -> dict[str, list[Scaled]]:
    return {
        kind: [each for each in found if each.kind == kind]
        for kind in dict.fromkeys(each.kind for each in found)
    }


def _hashes(found: list[Scaled]) -> dict[str, list[str]]:
    return {
        kind: list(dict.fromkeys(each.weights_sha256 for each in rows))
        for kind, rows in _groups(found).items()
    }


def _kinds() -> list[str]:
    """In the order of the tables; the last may have other bits by its count."""
    from lockstep.cli.lab.worker_runs import THREADS, WORKERS
    from lockstep.lab.threads.threads_bench import STEP, TRAINING

    return [STEP, TRAINING, WORKERS, THREADS]


def _say(text: str) -> None:
    print(f"lockstep: {text}", file=sys.stderr, flush=True)
