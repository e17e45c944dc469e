"""The state of a training run in memory: weights, optimizer memory, averaged weights, cursor; and its hashes.

The commit of a step changes all of it together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lockstep.comm.group import Group
from lockstep.models.tensors import float_state, model_tensors, tensors_sha256, trainable
from lockstep.spec import Optimizer
from lockstep.spec.optimizer_rule import RULES

Memory = dict[str, list[Tensor]]  # an optimizer's tensors, such as velocity: one per parameter


class Parts(Protocol):
    """The parts of a state that is dealt to workers: which are alike, and how to get the others'."""

    same: Group  # the workers that have this worker's part

    def collect(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of all parts at worker 0, and this worker's own elsewhere; a collective."""


def init_memory(optimizer: Optimizer, params: list[Tensor]) -> Memory:
    """The optimizer's memory before the first step: zeros."""
    return {name: [torch.zeros_like(p) for p in params] for name in RULES[optimizer.name].memory}


@dataclass
class Totals:
    """Sums over the steps of the current epoch; saved, so that a resumed epoch reports all its steps."""

    loss: float = 0.0
    correct: int = 0
    samples: int = 0


@dataclass
class TrainState:
    """Model, optimizer memory, averaged weights and the cursor (epoch, step in the epoch)."""

    model: nn.Module
    memory: Memory
    ema: dict[str, Tensor]
    epoch: int = 0
    step_in_epoch: int = 0
    step: int = 0
    totals: Totals = field(default_factory=Totals)
    best_score: float | None = None  # the accuracy; of a model that is no classifier, minus the loss
    best_step: int = -1
    evaluation: tuple[float, float | None] | None = None  # loss and accuracy of the last one
    metrics: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    parts: Parts | None = None  # None: this worker has all of it

    @classmethod
    def begin(cls, model: nn.Module, optimizer: Optimizer, ema: float) -> TrainState:
        """The state before the first step."""
        known = dict(model.named_parameters())
        params: list[Tensor] = [known[name].detach() for name in trainable(model)]
        return cls(model, init_memory(optimizer, params), float_state(model, copy=True) if ema else {})

    def tensors(self) -> dict[str, Tensor]:
        """Contiguous CPU copies of all tensors of the state, by name; a collective if it is in parts."""
        if self.parts:
            return self.parts.collect(self.named())
        return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in self.named().items()}

    def take_part(self, parts: Parts, free: Callable[[nn.Module], None]) -> None:
        """Keep one part from now on; `free` frees the model's tensors of the other parts."""
        before = trainable(self.model)
        free(self.model)
        kept, floats = set(trainable(self.model)), set(float_state(self.model))
        self.memory = {
            key: [tensor for name, tensor in zip(before, values, strict=True) if name in kept]
            for key, values in self.memory.items()
        }
        self.ema = {name: tensor for name, tensor in self.ema.items() if name in floats}
        self.parts = parts

    @torch.no_grad()
    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy saved tensors into this state; names and shapes must match exactly."""
        targets = self.named()
        if targets.keys() != tensors.keys():
            raise KeyError(", ".join(sorted(targets.keys() ^ tensors.keys())[:4]))
        for name, target in targets.items():
            if target.shape != tensors[name].shape:
                raise KeyError(f"{name} is {tuple(tensors[name].shape)}, not {tuple(target.shape)}")
        for name, target in targets.items():
            target.copy_(tensors[name])

    def cursor(self) -> dict[str, Any]:
        """Everything in the state that is not a tensor, for a checkpoint's manifest."""
        return {
            "epoch": self.epoch,
            "step_in_epoch": self.step_in_epoch,
            "step": self.step,
            "totals": vars(self.totals),
            "best_score": self.best_score,
            "best_step": self.best_step,
            "evaluation": self.evaluation,
            "metrics": self.metrics,
        }

    def load_cursor(self, numbers: Mapping[str, Any]) -> None:
        """Restore the numbers that `cursor` returned."""
        self.epoch, self.step = int(numbers["epoch"]), int(numbers["step"])
        self.step_in_epoch = int(numbers["step_in_epoch"])
        self.totals = Totals(**numbers["totals"])
        self.best_score = numbers.get("best_score", numbers.get("best_accuracy"))  # its name until 2026-11
        self.best_step, last = int(numbers["best_step"]), numbers["evaluation"]
        self.evaluation, self.metrics = (last[0], last[1]) if last else None, dict(numbers.get("metrics", {}))

    def results(self) -> dict[str, Any]:
        """What the last evaluation found, for a summary."""
        assert self.evaluation is not None, "a finished run was evaluated"
        loss, accuracy = self.evaluation
        found = {"accuracy": accuracy, "loss": loss, "metrics": self.metrics or None}
        found |= {"best_accuracy": None if accuracy is None else self.best_score, "best_step": self.best_step}
        return {name: value for name, value in found.items() if value is not None}

    def hashes(self) -> dict[str, str]:
        """The current state's `weights_sha256` and other hashes, as in `state_hashes`."""
        return state_hashes(self.tensors())

    def named(self) -> dict[str, Tensor]:
        """All tensors of the state by name, not copied."""
        named: dict[str, Tensor] = {f"model.{k}": v for k, v in model_tensors(self.model).items()}
        named |= {f"ema.{name}": tensor for name, tensor in self.ema.items()}
        names = trainable(self.model)
        for memory, values in self.memory.items():
            named |= {f"optimizer.{memory}.{n}": v for n, v in zip(names, values, strict=True)}
        return named


def state_hashes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """`weights_sha256` of a state's tensors; `optimizer_sha256` and `ema_sha256` if it has such tensors."""
    groups = {"weights": "model.", "optimizer": "optimizer.", "ema": "ema."}
    parts = {
        name: {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}
        for name, start in groups.items()
    }
    return {f"{name}_sha256": tensors_sha256(part) for name, part in parts.items() if part}
