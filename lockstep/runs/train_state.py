"""All that a run has learned so far, in memory: weights, optimizer memory, averages, cursor; and its hashes.

A commit changes all of it together: weights, buffers, optimizer memory, averaged weights and cursor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.models.tensors import float_state, model_tensors, tensors_sha256, trainable
from lockstep.spec import Optimizer
from lockstep.spec.optimizer_rule import RULES

Memory = dict[str, list[Tensor]]  # what an optimizer remembers of the parameters, by name


def init_memory(optimizer: Optimizer, params: list[Tensor]) -> Memory:
    """Zeros for everything that the optimizer's rule remembers."""
    return {name: [torch.zeros_like(p) for p in params] for name in RULES[optimizer.name].memory}


@dataclass
class Totals:
    """Sums over the steps of the epoch under way, so that a resumed epoch reports the whole."""

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
    best_accuracy: float = -1.0
    best_step: int = -1
    evaluation: tuple[float, float] | None = None  # the last one's loss and accuracy

    @classmethod
    def begin(cls, model: nn.Module, optimizer: Optimizer, ema: float) -> TrainState:
        """The state before the first step."""
        params: list[Tensor] = [p.detach() for p in model.parameters() if p.requires_grad]
        return cls(model, init_memory(optimizer, params), float_state(model, copy=True) if ema else {})

    def tensors(self) -> dict[str, Tensor]:
        """Copies of everything but the cursor, by name, in logical memory order, on the CPU."""
        return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in self.named().items()}

    @torch.no_grad()
    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy saved tensors into this state; the names must be exactly these."""
        targets = self.named()
        if targets.keys() != tensors.keys():
            raise KeyError(", ".join(sorted(targets.keys() ^ tensors.keys())[:4]))
        for name, target in targets.items():
            if target.shape != tensors[name].shape:
                raise KeyError(f"{name} is {tuple(tensors[name].shape)}, not {tuple(target.shape)}")
        for name, target in targets.items():
            target.copy_(tensors[name])

    def cursor(self) -> dict[str, Any]:
        """The numbers of the state, for a manifest."""
        return {
            "epoch": self.epoch,
            "step_in_epoch": self.step_in_epoch,
            "step": self.step,
            "totals": vars(self.totals),
            "best_accuracy": self.best_accuracy,
            "best_step": self.best_step,
            "evaluation": self.evaluation,
        }

    def load_cursor(self, numbers: Mapping[str, Any]) -> None:
        """Take the numbers of `cursor` back."""
        self.epoch, self.step = int(numbers["epoch"]), int(numbers["step"])
        self.step_in_epoch = int(numbers["step_in_epoch"])
        self.totals = Totals(**numbers["totals"])
        self.best_accuracy, self.best_step = float(numbers["best_accuracy"]), int(numbers["best_step"])
        last = numbers["evaluation"]
        self.evaluation = (float(last[0]), float(last[1])) if last else None

    def hashes(self) -> dict[str, str]:
        """`weights_sha256` and the like of the state as it is."""
        return state_hashes(self.tensors())

    def named(self) -> dict[str, Tensor]:
        """Everything but the cursor by name, as it lies in memory."""
        named: dict[str, Tensor] = {f"model.{k}": v for k, v in model_tensors(self.model).items()}
        named |= {f"ema.{name}": tensor for name, tensor in self.ema.items()}
        names = trainable(self.model)
        for memory, values in self.memory.items():
            named |= {f"optimizer.{memory}.{n}": v for n, v in zip(names, values, strict=True)}
        return named


def state_hashes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """`weights_sha256` of a state's tensors, and hashes of their own for optimizer and averaged weights."""
    groups = {"weights": "model.", "optimizer": "optimizer.", "ema": "ema."}
    parts = {
        name: {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}
        for name, start in groups.items()
    }
    return {f"{name}_sha256": tensors_sha256(part) for name, part in parts.items() if part}
