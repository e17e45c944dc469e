"""How a Run changes its weights: the optimizer and the schedule of its rate, checked when they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.spec.field import check_fields, fill_options, require, require_choice, require_range
from lockstep.spec.rule.learning_rate import CURVES, find_rate
from lockstep.spec.rule.optimizer_rule import RESTS, RULES
from lockstep.spec.rule.param_pattern import split_rates

OPTIMIZERS: dict[str, Mapping[str, Any]] = {name: rule.keys for name, rule in RULES.items()}
SCHEDULES: dict[str, Mapping[str, float]] = {name: curve.keys for name, curve in CURVES.items()}
SCALES = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}  # the power of the batch by which rates grow


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
    rates: tuple[str, ...] = ()  # PATTERN:FACTOR of lr, of the parameters whose names it fits

    def __post_init__(self) -> None:
        check_fields(self, "optimizer")
        object.__setattr__(self, "options", fill_options("optimizer", self, OPTIMIZERS))
        require(self.lr > 0, "optimizer.lr", self.lr, "must be above 0")
        require(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, "must be 0 or more")
        require_choice("optimizer.scale", self.scale, tuple(SCALES))
        require(self.base_batch >= 1, "optimizer.base_batch", self.base_batch, "must be at least 1")
        split_rates(self.rates)
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
