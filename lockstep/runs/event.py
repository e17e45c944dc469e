"""The events that training emits; progress bars, logs and callbacks listen to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.spec import Run


@dataclass(frozen=True)
class Started:
    """The run is checked and set up; the first step comes next."""

    directory: Path
    run: Run
    model: str
    data: str
    identity: str
    device: str
    num_params: int
    num_train: int
    num_test: int
    steps_per_epoch: int
    resumed_step: int
    num_workers: int = 1
    takes_over: bool = False  # replaces a lost worker, which has announced the run already
    kernels: str = "stock"
    num_val: int = 0  # 0 if there are no validation images beside the test images


@dataclass(frozen=True)
class StepDone:
    """A step was committed; `step` counts committed steps from 1."""

    epoch: int
    step_in_epoch: int
    step: int
    loss: float
    accuracy: float | None  # None, here and below, if the model is no classifier
    lr: float
    img_s: float
    data_wait_s: float = 0.0  # how long this worker waited for its images
    steps: int = 1  # how many were committed together, the last of which is `step` (train.local_steps)
    scale: float | None = None  # of the loss, in fp16
    skipped: bool = False  # whether its gradients overflowed in fp16, so that only the cursor moved

    def row(self) -> dict[str, Any]:
        """The event as a row of metrics.jsonl, without what most steps do not have."""
        found = {**vars(self), "steps": self.steps if self.steps > 1 else None}
        return {key: value for key, value in found.items() if value is not None and value is not False}


@dataclass(frozen=True)
class EpochDone:
    """An epoch was trained, and evaluated on the split `split`; `epoch` counts from 0."""

    epoch: int
    step: int
    train_loss: float
    train_accuracy: float | None
    eval_loss: float
    eval_accuracy: float | None
    img_s: float  # of this epoch's steps
    wait_share: float  # fraction of their time in which the worker that waited longest did so for data
    best: bool
    split: str = "test"  # "val" if the data has validation images
    metrics: dict[str, float] = field(default_factory=dict)  # the user's own, on that split

    def row(self) -> dict[str, Any]:
        """The event as a row of metrics.jsonl, where eval_loss is called test_loss or val_loss."""
        found = {key.replace("eval", self.split): value for key, value in vars(self).items()}
        del found["metrics"]
        found |= {f"{self.split}_{name}": value for name, value in self.metrics.items()}
        return {key: value for key, value in found.items() if value is not None}


@dataclass(frozen=True)
class Notice:
    """Something the user should know; a warning asks for attention."""

    text: str
    warning: bool = False


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint is on disk."""

    path: Path
    step: int


@dataclass(frozen=True)
class Finished:
    """The run is done; `summary` is what summary.json holds."""

    directory: Path
    summary: dict[str, Any]


@dataclass(frozen=True)
class Regrouped:
    """Workers were lost or joined, and a step was completed since; `step` is the last one before that."""

    generation: int
    step: int
    workers: int
    changes: tuple[str, ...]  # one sentence for each change
    since: float  # Unix time at which the first change was noticed
    seconds: float  # from then to the next completed step
    spares: int = 0  # workers that wait until one is lost
    undone: int = 0  # steps after `step` that are done again, as a part of the state was lost


@dataclass(frozen=True)
class Tried:
    """A dry run is over: steps were done in memory only; sizes in bytes."""

    run: Run
    model: str
    data: str
    num_params: int
    identity: str
    kernels: str
    steps: tuple[int, ...]  # of each epoch
    workers: tuple[dict[str, Any], ...]  # where each one ran, its seconds and its memory
    predicted: dict[str, float]  # seconds of the parts of a step; empty if the machine was not probed
    predicted_from: str
    predicted_bytes: float  # of the worker that needs the most; 0 if not known
    state_bytes: int  # of a checkpoint


Event = Started | StepDone | EpochDone | Notice | CheckpointSaved | Regrouped | Tried | Finished
Listener = Callable[[Event], None]
