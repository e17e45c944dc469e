"""`lockstep scale`: how much faster several workers are on this machine, measured by real trainings."""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.flag import add_device, add_json, add_run_keys
from lockstep.cli.foresight.scale_row import ScaleRow, print_scale, scale_records, tell_difference
from lockstep.cli.train import resolve_steps
from lockstep.errors import BadInput, LockstepError, SpecError
from lockstep.spec import Launch, Run
from lockstep.spec.run_file import dump_toml

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

_LEFT_OUT = 4  # first steps, in which memory is allocated and caches fill
_LOOK_S = 0.05
_TEXT = """\
Train a recipe for a few steps with each number of workers, and print how long a step takes:

  lockstep scale fashion --workers 1,2,4            strong scaling: the same batch by more workers
  lockstep scale fashion --workers 1,2,4 --weak     weak scaling: batch and lanes grow with the workers

Each is a real training in processes of its own; nothing of it is kept. A step's time is a median, without the
first four steps. With strong scaling the weights after the last step are compared too: they must be the same
bits for every number of workers. Let the machine be idle meanwhile. With --json it prints records.

With --cluster, which `lockstep probe` writes, the table also has what `lockstep plan` predicts from a profile
of one worker (--profile, else measured first), and how wrong that is.
"""


def add_parser(verbs: Verbs) -> None:
    """Add the verb and its flags."""
    parser = verbs.add_parser(
        "scale",
        help="measure how much faster several workers are here",
        description=_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run_keys(parser)
    parser.add_argument(
        "--workers", default="1,2", metavar="N,N", help="numbers of workers, rising; default: 1,2"
    )
    parser.add_argument(
        "--steps", type=int, default=24, metavar="N", help=f"of each training, {_LEFT_OUT} of them left out"
    )
    parser.add_argument("--weak", action="store_true", help="let batch and lanes grow with the workers")
    parser.add_argument("--cluster", metavar="NAME|FILE", help="predict the steps, too")
    parser.add_argument("--profile", type=Path, metavar="FILE.json", help="for the prediction")
    add_device(parser)
    add_json(parser)
    parser.set_defaults(handler=run_scale)


def run_scale(options: argparse.Namespace) -> int:
    """Train with each number of workers, and print what came out."""
    counts = _read_counts(options.workers)
    if options.steps <= _LEFT_OUT:
        raise BadInput(
            f"--steps {options.steps} must be above {_LEFT_OUT}: the first {_LEFT_OUT} do not count"
        )
    run = resolve_steps(options, Launch(quiet=options.json))
    runs = [_fit(run, count, counts[0], options) for count in counts]
    from lockstep.planner.preset import find_cluster

    cluster = find_cluster(options.cluster) if options.cluster else None
    if options.profile and not cluster:
        raise BadInput("--profile is for a prediction: give --cluster, too")
    predicted: list[float | None] = [None] * len(runs)
    if cluster:
        from lockstep.cli.foresight.predicted import predict_steps, read_or_measure

        profile = read_or_measure(options.profile, run, options.device)
        predicted = [*predict_steps([*zip(runs, counts, strict=True)], cluster, profile)]
    rows = []
    for count, each, guess in zip(counts, runs, predicted, strict=True):
        if not options.json:
            print(f"scale: {options.steps} steps by {count}", file=sys.stderr, flush=True)
        rows.append(replace(_measure(each, count, options), predicted_s=guess))
    same = len({row.weights_sha256 for row in rows}) == 1
    if options.json:
        print(json.dumps([asdict(record) for record in scale_records(rows, run, options)], indent=1))
    else:
        print_scale(rows, run)
        if not options.weak:
            print("weights: the same bits with every number of workers" if same else tell_difference(rows))
    return int(not (same or options.weak))


def _read_counts(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise BadInput(f"--workers {text} must be numbers with commas, as 1,2,4")
    counts = [int(word) for word in words]
    if counts != sorted(set(counts)) or counts[0] < 1:
        raise BadInput(f"--workers {text} must rise from 1 or more, as 1,2,4")
    return counts


def _fit(run: Run, count: int, first: int, options: argparse.Namespace) -> Run:
    """The run for a number of workers, with a checkpoint after its last step that counts."""
    train = run.train
    if options.weak:
        if count % first or (count // first) & (count // first - 1):
            raise BadInput(
                f"--weak --workers {options.workers}: {count} is not {first} times a power of two, and lanes "
                "must be one: use doubled numbers, as 1,2,4"
            )
        times = count // first
        train = replace(train, batch=times * train.batch, lanes=times * train.lanes)
    if count > train.lanes:
        raise SpecError(f"--workers {count}: train.lanes={train.lanes} is the most; use -o train.lanes=N")
    return replace(run, train=train, checkpoint=replace(run.checkpoint, every_steps=options.steps))


def _measure(run: Run, count: int, options: argparse.Namespace) -> ScaleRow:
    """Train in a process of its own until the checkpoint is there, then stop it."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "run.toml")
        config.write_text(dump_toml(run), encoding="utf-8")
        command = [sys.executable, "-m", "lockstep", "train", "-c", str(config), "--quiet"]
        command += ["--workers", str(count), "--device", options.device]
        command += ["--runs-dir", folder, "--name", "scale"]
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors)
            saved = Path(folder, "scale", "checkpoints", f"step-{options.steps:09d}.json")
            try:
                while process.poll() is None and not saved.is_file():
                    time.sleep(_LOOK_S)
            finally:
                _end(process)
            if not saved.is_file():
                errors.seek(0)
                said = errors.read().replace(f"{config}: ", "")
                raise _explain(count, process.returncode, said, options.steps)
        weights = json.loads(saved.read_text(encoding="utf-8"))["weights_sha256"]
        seconds = _step_times(saved.parents[1] / "metrics.jsonl", options.steps, run.train.batch)
    spread = min(seconds), max(seconds)
    median = statistics.median(seconds)
    return ScaleRow(count, run.train.batch, run.train.lanes, median, spread, len(seconds), weights)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a training at once: its launcher ends its workers, even if it is killed."""
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    process.wait()


def _explain(count: int, code: int, said: str, steps: int) -> LockstepError:
    """Why a training ended before its checkpoint."""
    lines = [line.partition("lockstep: ")[2] or line for line in said.splitlines() if line.strip()]
    reason = lines[-1] if lines and code else f"the run has fewer than {steps} steps: give fewer --steps"
    return SpecError(f"--workers {count}: {reason}")


def _step_times(path: Path, steps: int, batch: int) -> list[float]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        batch / row["img_s"] for row in rows if row["kind"] == "step" and _LEFT_OUT < row["step"] <= steps
    ]
