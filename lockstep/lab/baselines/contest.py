"""One contestant's race: it starts, trains and predicts, is timed, and its outcome is written as JSON."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from lockstep.lab.baselines.baseline_task import Array, BaselineTask, read_task

_ROUNDS, _PATIENCE_S = 20, 1.0  # of an inference


@dataclass(frozen=True)
class Outcome:
    """What a contestant reports. Times in seconds."""

    precision: str
    startup_s: float  # imports, compilation, data: from the start of its process to the first step
    train_s: float  # all steps of all epochs
    first_loss: float  # of the first step
    last_loss: float  # mean of the last epoch
    accuracy: float  # on the test images
    infer_one_s: float | None = None
    infer_batch_s: float | None = None
    weights_sha256: str = ""  # where a contestant says so


class Contestant(Protocol):
    """A way to train emotion48."""

    precision: str

    def warm_up(self) -> None:
        """Compile what is compiled at the first call; the weights stay."""

    def train(self, order: Array) -> Sequence[float]:
        """Steps over the images `order` [epoch, step, sample]; gives the loss of every step."""

    def predict(self, images: Array) -> Array:
        """Scores [N, classes] of images [N, 1, 48, 48], on the host."""


def race(make: Callable[[BaselineTask], Contestant], times_inference: bool = True) -> None:
    """Run the contestant that `make` makes, as this process, whose arguments are a folder and its start."""
    folder, started = sys.argv[1], float(sys.argv[2])
    task = read_task(folder)
    order, tests, labels = task.array("order"), task.array("tests"), task.array("test_labels")
    contestant = make(task)
    contestant.warm_up()
    startup_s, clock = time.time() - started, time.perf_counter()
    losses = contestant.train(order)
    train_s = time.perf_counter() - clock
    outcome = Outcome(
        contestant.precision,
        startup_s,
        train_s,
        float(losses[0]),
        float(np.mean(losses[-order.shape[1] :])),
        find_accuracy(contestant.predict, tests, labels, task.batch),
        *(time_inference(contestant.predict, tests, task.batch) if times_inference else ()),
    )
    write_outcome(task, outcome)


def write_outcome(task: BaselineTask, outcome: Outcome) -> None:
    """For the process that started this one."""
    Path(task.folder, "outcome.json").write_text(json.dumps(asdict(outcome)))


def find_accuracy(predict: Callable[[Array], Array], images: Array, labels: Array, batch: int) -> float:
    """The share of right answers. All batches have the same size, since some compile for every size."""
    right = 0
    for first in range(0, len(images), batch):
        part = images[first : first + batch]
        padded = np.concatenate([part, np.repeat(part[-1:], batch - len(part), 0)])
        right += int((predict(padded)[: len(part)].argmax(1) == labels[first : first + batch]).sum())
    return right / len(images)


def time_inference(
    predict: Callable[[Array], Array], images: Array, batch: int
) -> tuple[float | None, float | None]:
    """Median seconds for one image and for a batch, from memory of the host to scores there."""
    return _time(predict, images[:1]), _time(predict, np.resize(images, (batch, *images.shape[1:])))


def _time(predict: Callable[[Array], Array], images: Array) -> float:
    predict(images)
    found = list[float]()
    while len(found) < _ROUNDS and (len(found) < 3 or sum(found) < _PATIENCE_S):
        clock = time.perf_counter()
        predict(images)
        found.append(time.perf_counter() - clock)
    return statistics.median(found)
