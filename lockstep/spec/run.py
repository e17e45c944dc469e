"""A Run: the settings of a training run that a person decides, with defaults, checked when it is made.

Every setting that can change the bits of a run is here. How a run is launched is in `launch`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from lockstep.spec.field import check_fields, require, require_choice, require_range
from lockstep.spec.rule.batch_growth import BatchStage, find_stages, join_batches, split_batches
from lockstep.spec.rule.clip_rule import check_clip
from lockstep.spec.rule.compression import check_compression
from lockstep.spec.rule.evaluated import Evaluate
from lockstep.spec.rule.lane_grid import check_cuts, check_grid
from lockstep.spec.rule.local_steps import check_local_steps
from lockstep.spec.rule.loss_rule import LOSSES, check_loss, write_weights
from lockstep.spec.rule.loss_scale import GROWTH, START, check_scale
from lockstep.spec.rule.update_rule import SCALES, Optimizer, Schedule
from lockstep.spec.sample.augmentation import check_item
from lockstep.spec.sample.normalization import split_normalize
from lockstep.spec.sample.sample_order import check_repeats, find_block

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
WIRES = ("fp32", "bf16")
KERNEL_SETS = ("auto", "stock", "fused", "compiled")
_WHILE_TRAINING = 3  # checkpoints that are kept: if the newest is damaged, there are others


@dataclass(frozen=True)
class Model:
    """Which network; `options` are its own keys, checked when it is built."""

    name: str = "lenet5"
    weights: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    freeze: tuple[str, ...] = ()  # patterns of names of parameters that stay as they are

    def __post_init__(self) -> None:
        if self.weights == "none":
            object.__setattr__(self, "weights", None)
        check_fields(self, "model")


@dataclass(frozen=True)
class Data:
    """Which images; `options` are the data set's own keys, checked when it is opened."""

    name: str = "shapes"
    dir: str | None = None
    augment: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    order: str = "shuffled"  # or blocks:N: blocks of N neighbours, then within windows; or balanced
    repeats: int = 1  # how often each sample of an epoch is there
    normalize: str = ""  # mean and std as 0.5/0.5; none: the data set's own

    def __post_init__(self) -> None:
        check_fields(self, "data")
        for item in self.augment:
            check_item(item)
        find_block(self.order)
        check_repeats(self.repeats, self.order)
        split_normalize(self.normalize)


@dataclass(frozen=True)
class Train:
    """How long to train, and how a step is computed from a batch."""

    epochs: int = 5
    batch: int = 256  # of the first epochs, if it grows; in a file it may be 256@0,512@10,1024@15
    lanes: int = 8
    bands: int = 1  # rows of an image whose sums over pixels are summed in a tree
    slices: int = 1  # outputs of a fully connected layer whose sums are summed in a tree
    precision: str = "fp32"
    wire: str = "fp32"
    compress: str = "none"  # or bf16, fp8, int8, top:SHARE, rank:NUMBER
    compress_after: int = 0  # epochs that are not compressed, before
    local_steps: int = 1  # that a lane takes on weights of its own, before the lanes meet
    loss: str = "cross_entropy"
    label_smoothing: float = 0.0
    class_weights: str = "none"  # balanced; or a number for each class, also as a list
    clip: float = 0.0  # the largest norm of all gradients
    clip_value: float = 0.0  # the largest value in them
    loss_scale: float = START  # of the first step in fp16; then it moves by itself
    scale_growth: int = GROWTH  # steps without an overflow until it is doubled
    recompute: bool = False  # compute blocks again in the backward pass, to keep less in memory
    ema: float = 0.0
    sync_norm: bool = False
    channels_last: bool = False
    threads: int = 1
    growth: str = ""  # the later batches, as 512@10,1024@15; in a file they are a part of `batch`

    def __post_init__(self) -> None:
        for name, value in zip(("batch", "growth"), split_batches(self.batch, self.growth), strict=True):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "class_weights", write_weights(self.class_weights))
        check_fields(self, "train")
        for name in ("epochs", "batch", "lanes", "bands", "slices", "local_steps", "threads"):
            require(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "must be at least 1")
        require(self.threads <= 1024, "train.threads", self.threads, "must be at most 1024")
        check_cuts(self.lanes, self.bands, self.slices, self.recompute)
        find_stages(self.batch, self.growth, self.epochs, self.lanes)
        require_choice("train.precision", self.precision, PRECISIONS)
        require_choice("train.wire", self.wire, WIRES)
        check_compression(self.compress, self.compress_after, self.wire)
        require_range("train.label_smoothing", self.label_smoothing, 0.0, 1.0)
        require_range("train.ema", self.ema, 0.0, 1.0)
        check_clip(self.clip, self.clip_value)
        check_scale(self.precision, self.loss_scale, self.scale_growth, self.local_steps)
        check_loss(self.loss, self.label_smoothing, self.class_weights)

    @cached_property
    def stages(self) -> tuple[BatchStage, ...]:
        """The epochs of each batch; one stage, if it does not grow."""
        return find_stages(self.batch, self.growth, self.epochs, self.lanes)

    @property
    def targets(self) -> str:
        """What the loss takes as targets: `classes`, `labels` or `numbers`."""
        return LOSSES[self.loss]

    @property
    def batches(self) -> int | str:
        """All of `train.batch`, as a person writes it."""
        return join_batches(self.batch, self.growth)

    def batch_of(self, epoch: int) -> int:
        """The batch of an epoch's steps; after the last epoch, that of the last."""
        return next(stage.batch for stage in reversed(self.stages) if epoch >= stage.epochs.start)


@dataclass(frozen=True)
class Kernels:
    """Which kernels compute the step; `table` names a file of tiles to use instead of Lockstep's own."""

    set: str = "auto"
    table: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, "kernels")
        require_choice("kernels.set", self.set, KERNEL_SETS)


@dataclass(frozen=True)
class Checkpoint:
    """How often checkpoints are saved within an epoch, and how many are kept; never changes a bit."""

    every_steps: int = 500
    keep: int = 0  # how many of the newest, besides the best; 0: three while the run trains, then one

    def __post_init__(self) -> None:
        check_fields(self, "checkpoint")
        require(self.every_steps >= 1, "checkpoint.every_steps", self.every_steps, "must be at least 1")
        rule = "must be 0 (three while the run trains, then the last), or how many of the newest stay"
        require(self.keep >= 0, "checkpoint.keep", self.keep, rule)

    def count(self, finished: bool) -> int:
        """How many of the newest checkpoints are kept."""
        return self.keep or (1 if finished else _WHILE_TRAINING)


@dataclass(frozen=True)
class Run:
    """A whole training run; every key has a default."""

    seed: int = 0
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    train: Train = field(default_factory=Train)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    kernels: Kernels = field(default_factory=Kernels)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    evaluate: Evaluate = field(default_factory=Evaluate)

    def __post_init__(self) -> None:
        check_fields(self, "")
        require(0 <= self.seed < 2**63, "seed", self.seed, "must be from 0 to 2^63-1")
        train, most = self.train, max(stage.batch for stage in self.train.stages)
        self.evaluate.check_kind(train.loss)
        check_grid(train.bands, train.slices, self.kernels.set)
        check_local_steps(train.local_steps, most, train.sync_norm, self.kernels.set)
        require(
            self.schedule.warmup_epochs <= self.train.epochs,
            "schedule.warmup_epochs",
            self.schedule.warmup_epochs,
            f"must not pass train.epochs={self.train.epochs}",
        )

    def at(self, epoch: int) -> Run:
        """The run with the batch of an epoch throughout."""
        return replace(self, train=replace(self.train, batch=self.train.batch_of(epoch), growth=""))

    def is_over(self, epoch: int, worse: int) -> bool:
        """Whether all epochs are trained, or the last `worse` ones have used up the patience."""
        return epoch == self.train.epochs or 0 < self.evaluate.patience <= worse

    @property
    def rate_factor(self) -> float:
        """By what all rates are multiplied, for the batch."""
        return float((self.train.batch / self.optimizer.base_batch) ** SCALES[self.optimizer.scale])
