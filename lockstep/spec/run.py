"""A Run: the settings of a training run that a person decides, with defaults, checked when it is made.

Every setting that can change the bits of a run is here. How a run is launched is in `launch`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from lockstep.spec.field import check_fields, fill_options, require, require_choice, require_range
from lockstep.spec.rule.augmentation import check_item
from lockstep.spec.rule.batch_growth import BatchStage, find_stages, join_batches, split_batches
from lockstep.spec.rule.compression import check_compression
from lockstep.spec.rule.learning_rate import CURVES, find_rate
from lockstep.spec.rule.local_steps import check_local_steps
from lockstep.spec.rule.optimizer_rule import RESTS, RULES
from lockstep.spec.rule.sample_order import check_repeats, find_block

OPTIMIZERS: dict[str, Mapping[str, Any]] = {name: rule.keys for name, rule in RULES.items()}
SCHEDULES: dict[str, Mapping[str, float]] = {name: curve.keys for name, curve in CURVES.items()}
PRECISIONS = ("fp32", "tf32", "bf16")
WIRES = ("fp32", "bf16")
LOSSES = ("cross_entropy", "squared_error")
SCALES = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}  # the power of the batch by which rates grow
KERNEL_SETS = ("auto", "stock", "fused", "compiled")
_WHILE_TRAINING = 3  # checkpoints that are kept: if the newest is damaged, there are others
_MOST_CELLS = 64  # of a grid


@dataclass(frozen=True)
class Model:
    """Which network; `options` are its own keys, checked when it is built."""

    name: str = "lenet5"
    weights: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, "model")


@dataclass(frozen=True)
class Data:
    """Which images; `options` are the data set's own keys, checked when it is opened."""

    name: str = "shapes"
    dir: str | None = None
    augment: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    order: str = "shuffled"  # or blocks:N: blocks of N neighbours, then within windows of 16 blocks
    repeats: int = 1  # how often each sample of an epoch is there

    def __post_init__(self) -> None:
        check_fields(self, "data")
        for item in self.augment:
            check_item(item)
        find_block(self.order)
        check_repeats(self.repeats)


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
    clip: float = 0.0
    ema: float = 0.0
    sync_norm: bool = False
    channels_last: bool = False
    threads: int = 1
    growth: str = ""  # the later batches, as 512@10,1024@15; in a file they are a part of `batch`

    def __post_init__(self) -> None:
        for name, value in zip(("batch", "growth"), split_batches(self.batch, self.growth), strict=True):
            object.__setattr__(self, name, value)
        check_fields(self, "train")
        for name in ("epochs", "batch", "lanes", "bands", "slices", "local_steps", "threads"):
            require(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "must be at least 1")
        require(self.threads <= 1024, "train.threads", self.threads, "must be at most 1024")
        for name in ("lanes", "bands", "slices"):
            key, value = f"train.{name}", getattr(self, name)
            is_fine = name == "lanes" or value <= _MOST_CELLS
            require(is_fine, key, value, f"must be at most {_MOST_CELLS}")
            power = 1 << (value.bit_length() - 1)
            require(value == power, key, value, f"must be a power of two: use {power} or {2 * power}")
        find_stages(self.batch, self.growth, self.epochs, self.lanes)
        require_choice("train.precision", self.precision, PRECISIONS)
        require_choice("train.wire", self.wire, WIRES)
        check_compression(self.compress, self.compress_after, self.wire)
        require_choice("train.loss", self.loss, LOSSES)
        require_range("train.label_smoothing", self.label_smoothing, 0.0, 1.0)
        require_range("train.ema", self.ema, 0.0, 1.0)
        require(self.clip >= 0, "train.clip", self.clip, "must be 0 (off) or the largest gradient norm")
        fits, smoothing = self.loss == "cross_entropy", self.label_smoothing
        rule = f"works with loss=cross_entropy only; train.loss is {self.loss}: set label_smoothing=0"
        require(fits or not smoothing, "train.label_smoothing", smoothing, rule)

    @cached_property
    def stages(self) -> tuple[BatchStage, ...]:
        """The epochs of each batch; one stage, if it does not grow."""
        return find_stages(self.batch, self.growth, self.epochs, self.lanes)

    @property
    def batches(self) -> int | str:
        """All of `train.batch`, as a person writes it."""
        return join_batches(self.batch, self.growth)

    def batch_of(self, epoch: int) -> int:
        """The batch of an epoch's steps; after the last epoch, that of the last."""
        return next(stage.batch for stage in reversed(self.stages) if epoch >= stage.epochs.start)


@dataclass(frozen=True)
class Optimizer:
    """The update rule; `options` are its own keys (`OPTIMIZERS`), filled with their defaults."""

    name: str = "momentum"
    lr: float = 0.05
    weight_decay: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)
    decay_norms: bool = True  # false: weight decay leaves out norms and biases
    scale: str = "none"  # how the rates grow with train.batch over base_batch
    base_batch: int = 256

    def __post_init__(self) -> None:
        check_fields(self, "optimizer")
        object.__setattr__(self, "options", fill_options("optimizer", self, OPTIMIZERS))
        require(self.lr > 0, "optimizer.lr", self.lr, "must be above 0")
        require(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, "must be 0 or more")
        require_choice("optimizer.scale", self.scale, tuple(SCALES))
        require(self.base_batch >= 1, "optimizer.base_batch", self.base_batch, "must be at least 1")
        for key, value in self.options.items():
            if key in ("eps", "trust", "rest_lr"):
                require(value > 0, f"optimizer.{key}", value, "must be above 0")
            elif key == "rest":
                require_choice("optimizer.rest", str(value), RESTS)
            else:
                require_range(f"optimizer.{key}", value, 0.0, 1.0)


@dataclass(frozen=True)
class Schedule:
    """The learning rate over the run; `options` are its own keys (`SCHEDULES`)."""

    name: str = "cosine"
    warmup_epochs: float = 0.0
    options: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, "schedule")
        object.__setattr__(self, "options", fill_options("schedule", self, SCHEDULES))
        require(self.warmup_epochs >= 0, "schedule.warmup_epochs", self.warmup_epochs, "must be 0 or more")
        for key, value in self.options.items():
            if key in ("every_epochs", "peak"):
                require(value > 0, f"schedule.{key}", value, "must be above 0")
            require(value >= 0, f"schedule.{key}", value, "must be 0 or more")
            require(key != "peak" or value < 1, f"schedule.{key}", value, "must be below 1")
        require(
            self.name != "onecycle" or not self.warmup_epochs,
            "schedule.warmup_epochs",
            self.warmup_epochs,
            "must be 0 with onecycle, which rises by itself (schedule.peak, schedule.start)",
        )

    def rate(self, base: float, step: int, total_steps: int, steps_per_epoch: int) -> float:
        """The learning rate of a step, which counts from 0."""
        warmup = round(self.warmup_epochs * steps_per_epoch)
        epochs = (step - warmup) / steps_per_epoch
        return find_rate(self.name, self.options, base, warmup, step, total_steps, epochs)


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

    def __post_init__(self) -> None:
        check_fields(self, "")
        require(0 <= self.seed < 2**63, "seed", self.seed, "must be from 0 to 2^63-1")
        train, most = self.train, max(stage.batch for stage in self.train.stages)
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

    @property
    def rate_factor(self) -> float:
        """By what all rates are multiplied, for the batch."""
        return float((self.train.batch / self.optimizer.base_batch) ** SCALES[self.optimizer.scale])
