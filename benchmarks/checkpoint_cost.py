"""What a checkpoint that is written beside training costs the steps.

python benchmarks/checkpoint_cost.py                   # ResNet-18 of 32 pixels on a CPU
bash benchmarks/gpu.sh checkpoints                     # ResNet-50 of 224 pixels in bf16, every 100 steps

One run, in stretches of `--every` steps, each of which begins with another way in turn: no checkpoint, one
that is written beside the steps, one that they wait for. The run is that of `lockstep train`; a stretch is an
epoch, with an evaluation of one batch. A stretch is compared with those without a checkpoint right before and
after it; the first stretches of all warm up.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measure import make_parser, make_record

import lockstep
from lockstep.data.store import MemorySplit, Store
from lockstep.elastic.worker_groups import WorkerGroups
from lockstep.runs.event import CheckpointSaved, StepDone
from lockstep.runs.saving.saver import Saver
from lockstep.runs.saving.state_copy import StateCopy
from lockstep.spec.record import write_records
from lockstep.spec.run_file import from_table, merge, parse_overrides, to_table
from lockstep.train.setup import Given
from lockstep.train.worker import fit

WAYS = ("none", "beside", "none", "waited for")
WARM = len(WAYS)  # stretches that do not count


class Watch:
    """Chooses the way of each stretch, and notes its seconds; ends the run after so many."""

    def __init__(self, every: int, stretches: int) -> None:
        self.every, self.stretches = every, stretches
        self.began, self.seconds = 0.0, list[float]()
        self.copied_s, self.whole_s, self.size = list[float](), list[float](), 0
        self._save, self._take = Saver.save, StateCopy.take

    def __enter__(self) -> Watch:
        def save(saver: Saver, *given: Any, **options: Any) -> bool:
            return self._saved(saver, *given, **options)

        def take(copy: StateCopy, *given: Any) -> Any:
            return self._taken(copy, *given)

        Saver.save, StateCopy.take = save, take  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        Saver.save, StateCopy.take = self._save, self._take  # type: ignore[method-assign]

    def __call__(self, event: object) -> None:
        if isinstance(event, StepDone) and event.step % self.every == 0:
            now = time.perf_counter()
            if self.began:
                self.seconds.append(now - self.began)
            self.began = now
            if len(self.seconds) == self.stretches:
                raise InterruptedError
        elif isinstance(event, CheckpointSaved):
            self.whole_s.append(time.perf_counter() - self.began)
            self.size = event.path.with_suffix(".safetensors").stat().st_size

    @property
    def way(self) -> str:
        """Of the stretch that begins now."""
        return WAYS[len(self.seconds) % len(WAYS)]

    def _saved(self, *arguments: Any, **options: Any) -> bool:
        if self.way == "none":
            return True
        return self._save(*arguments, **options, wait=self.way == "waited for")

    def _taken(self, *arguments: Any) -> Any:
        start = time.perf_counter()
        found = self._take(*arguments)
        self.copied_s.append(time.perf_counter() - start)
        return found


def main() -> None:
    parser = make_parser(__doc__, "checkpoint-cost-cpu.json")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=6, help="stretches of each way")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    options = parser.parse_args()
    stretches = WARM + len(WAYS) * options.rounds + 1
    keys = {
        "model.name": options.model,
        "train.batch": options.batch,
        "train.lanes": options.lanes,
        "train.epochs": stretches + 2,  # each is a stretch
        "train.precision": options.precision,
        "schedule.warmup_epochs": 0,
        "optimizer.lr": 0.001,
        "checkpoint.every_steps": options.every,
    }
    given = parse_overrides([f"{key}={value}" for key, value in keys.items()])
    run = from_table(merge(to_table(lockstep.recipe("shapes")), given))
    images = Given(data=make_images(options.size, options.batch, options.every))
    with tempfile.TemporaryDirectory() as folder, Watch(options.every, stretches) as watch:
        launch = lockstep.Launch(name="run", runs_dir=Path(folder), device=options.device)
        with contextlib.suppress(InterruptedError):
            fit(run, launch, watch, WorkerGroups, images)
    details = {
        "ms a step without": round(1e3 * statistics.median(watch.seconds[WARM::2]) / options.every, 3),
        "checkpoint MB": round(watch.size / 1e6, 1),
        "ms copying": round(1e3 * statistics.median(watch.copied_s), 1),
        "s until it is whole, beside": round(statistics.median(watch.whole_s[::2]), 3),
        "s until it is whole, waited for": round(statistics.median(watch.whole_s[1::2]), 3),
        "every": options.every,
        "batch": options.batch,
        "size": options.size,
        "precision": options.precision,
    }
    records = []
    for way in ("beside", "waited for"):
        shares = [
            2 * mine / (before + after) - 1
            for number, (before, mine, after) in enumerate(zip(*offsets(watch.seconds), strict=False), 1)
            if number >= WARM and WAYS[number % len(WAYS)] == way
        ]
        what = f"{options.model}, a checkpoint every {options.every} steps, {way}: time added to the steps"
        records.append(make_record(what, [100 * share for share in shares], "%", **details))
        print(f"{what}: {records[-1].value:.2f} % {records[-1].spread} n={records[-1].n}")
    print(details)
    write_records(options.output, records)


def make_images(size: int, batch: int, steps: int) -> Store:
    """As many random images as so many steps take, and a batch for the evaluation."""
    train, test = (
        MemorySplit(
            torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8), torch.randint(0, 10, (count,))
        )
        for count in (batch * steps, batch)
    )
    half = (0.5,) * 3
    return Store("random", tuple(map(str, range(10))), (3, size, size), train, test, half, half)


def offsets(seconds: list[float]) -> list[list[float]]:
    """The same list from its first, second and third element on."""
    return [list(itertools.islice(seconds, first, None)) for first in range(3)]


if __name__ == "__main__":
    main()
