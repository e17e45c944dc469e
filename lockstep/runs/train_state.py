"""The state of a training run in memory: weights, optimizer memory, averaged weights, cursor; and its hashes.

The commit of a step changes all of it together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.compress.feedback import Feedback
from lockstep.comm.shard.share import Share
from lockstep.models.tensors import TensorHash, float_state, has_values, model_tensors, trainable
from lockstep.models.weights import head_names
from lockstep.runs.state_parts import StateParts, StatePiece
from lockstep.spec import Evaluate, Optimizer
from lockstep.spec.param_group import ParamGroup, group_params
from lockstep.spec.rule.loss_scale import LossScale
from lockstep.spec.rule.optimizer_rule import RULES

Memory = dict[str, list[Tensor]]  # an optimizer's tensors, such as velocity: one per parameter
_NUMBERS = (
    "epoch", "step_in_epoch", "step", "inner_steps", "best_score", "best_step", "worse_epochs", "evaluation",
    "metrics",
)  # fmt: skip
NamedMemory = dict[str, dict[str, Tensor]]  # the same by the name of the parameter


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
    memory: NamedMemory
    ema: dict[str, Tensor]
    epoch: int = 0
    step_in_epoch: int = 0
    step: int = 0
    inner_steps: int = 0  # how many of these were followed by no update: all but the last of each round
    scale: LossScale | None = None  # of the loss, in fp16
    totals: Totals = field(default_factory=Totals)
    best_score: float | None = None  # of `Evaluate.score`
    best_step: int = -1
    worse_epochs: int = 0  # since the best one
    evaluation: tuple[float, float | None] | None = None  # loss and accuracy of the last one
    metrics: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    parts: StateParts | None = None  # None: this worker has all of it
    share: Share | None = None  # of the trained parameters; None: this worker has whole ones
    averaged: Share | None = None  # the same of their averages, whose pieces are in `ema`
    finish: Callable[[Tensor], object] | None = None  # commits a step whose gradients' norm was not known yet
    norm: Tensor | None = None  # of the gradients of the last step, if the state is in parts
    feedback: Feedback | None = None  # this worker's part of what compression left out
    names: list[str] | None = None  # of the parameters that are trained here; None: all of the model
    groups: list[ParamGroup] = field(default_factory=list)  # of `trained`, by their optimizers

    @classmethod
    def begin(
        cls,
        model: nn.Module,
        optimizer: Optimizer,
        ema: float,
        parts: StateParts | None = None,
        share: Share | None = None,
        feedback: Feedback | None = None,
    ) -> TrainState:
        """The state before the first step, of a model of which this worker may have only a part."""
        state = cls(model, {}, {}, parts=parts, share=share, feedback=feedback, names=trainable(model))
        state.begin_groups(optimizer)
        if ema and share:
            state.averaged = share.copy()
            floats = float_state(model).items()
            state.ema = {name: value.clone() for name, value in floats if name not in share.shapes}
            state.ema |= state.averaged.pieces
            state.ema |= {alias: piece.clone() for alias, piece in state.averaged.other_pieces.items()}
        elif ema:
            state.ema = float_state(model, copy=True)
        return state

    @property
    def updates(self) -> int:
        """How many times the weights were updated: once a step that was taken, or a round of local steps."""
        return self.step - self.inner_steps - (self.scale.skipped if self.scale else 0)

    def trained(self) -> dict[str, Tensor]:
        """What is updated here: the trained parameters of the model, or this worker's pieces of them."""
        known, cut = dict(self.model.named_parameters()), self.share.shapes if self.share else {}
        names = [name for name in self.names or trainable(self.model) if name not in cut]
        whole = {name: known[name].detach() for name in names}
        return whole | self.share.pieces if self.share else whole

    def begin_groups(self, optimizer: Optimizer) -> None:
        """Give the trained parameters their optimizers, with memory before the first step."""
        trained, whole = self.trained(), self.share.shapes if self.share else {}
        shapes = {name: whole.get(name, tensor.shape) for name, tensor in trained.items()}
        self.groups = group_params(optimizer, shapes, head_names(self.model))
        self.memory = {}
        for group in self.groups:
            begun = init_memory(group.optimizer, [trained[name] for name in group.names])
            for key, tensors in begun.items():
                self.memory.setdefault(key, {}).update(zip(group.names, tensors, strict=True))

    def memory_of(self, group: ParamGroup) -> Memory:
        """The memory of a group's optimizer, in the order of the group."""
        return {key: [self.memory[key][name] for name in group.names] for key in group.rule.memory}

    def floats(self) -> dict[str, Tensor]:
        """What the averages in `ema` are of, by the same names."""
        pieces = self.share.pieces | self.share.other_pieces if self.share else {}
        found = float_state(self.model) | pieces
        return {name: found[name] for name in self.ema}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors of the state in order of names, on the CPU and contiguous, to be used at once.

        If the state is in parts it is a collective, and only worker 0 gets values.
        """
        return (self.parts or StateParts()).collect(self.pieces())

    def pieces(self) -> list[StatePiece]:
        """What this worker has of every tensor of the state."""
        starts, shapes = (self.share.starts, self.share.shapes) if self.share else ({}, {})
        found = []
        for name, tensor in self.named().items():
            own = name.split(".", 2 if name.startswith("optimizer.") else 1)[-1]
            shape = tuple(shapes.get(own, tensor.shape))
            found.append(StatePiece(name, shape, starts.get(own, 0), tensor))
        kept = self.feedback.pieces() if self.feedback else ()
        return [*found, *(StatePiece(p.name, p.shape, p.start, p.tensor) for p in kept)]

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

    def note(self, loss: float, accuracy: float | None, metrics: dict[str, float], by: Evaluate) -> bool:
        """Keep what an evaluation found; returns whether it is the best so far."""
        self.evaluation, self.metrics = (loss, accuracy), metrics
        score, self.worse_epochs = by.score(loss, accuracy, metrics), self.worse_epochs + 1
        if best := score is not None and (self.best_score is None or score > self.best_score):
            self.best_score, self.best_step, self.worse_epochs = score, self.step, 0
        return best

    def cursor(self) -> dict[str, Any]:
        """Everything in the state that is not a tensor, for a checkpoint's manifest."""
        parts = {"totals": vars(self.totals), "scale": self.scale and vars(self.scale)}
        return {name: getattr(self, name) for name in _NUMBERS} | parts

    def load_cursor(self, numbers: Mapping[str, Any]) -> None:
        """Restore the numbers that `cursor` returned."""
        self.epoch, self.step = int(numbers["epoch"]), int(numbers["step"])
        self.step_in_epoch, self.inner_steps = int(numbers["step_in_epoch"]), numbers.get("inner_steps", 0)
        self.totals = Totals(**numbers["totals"])
        self.best_score = numbers.get("best_score", numbers.get("best_accuracy"))  # its name until 2026-11
        scale, last = numbers.get("scale"), numbers["evaluation"]
        self.best_step, self.scale = int(numbers["best_step"]), LossScale(**scale) if scale else None
        self.worse_epochs = numbers.get("worse_epochs", 0)
        self.evaluation, self.metrics = (last[0], last[1]) if last else None, dict(numbers.get("metrics", {}))

    def results(self, by: Evaluate) -> dict[str, Any]:
        """What the last evaluation found, and the best one, for a summary."""
        assert self.evaluation is not None, "a finished run was evaluated"
        loss, accuracy = self.evaluation
        found: dict[str, Any] = {"accuracy": accuracy, "loss": loss, "metrics": self.metrics or None}
        found |= by.tell_best(self.best_score, accuracy is not None) | {"best_step": self.best_step}
        found |= {"skipped_steps": self.scale.skipped, "loss_scale": self.scale.value} if self.scale else {}
        return {name: value for name, value in found.items() if value is not None}

    def hashes(self) -> dict[str, str]:
        """`weights_sha256` of the state; `optimizer_sha256` and `ema_sha256` if it has such tensors.

        A collective if the state is in parts; then only worker 0's are right.
        """
        return hash_state(self.tensors())

    def common(self) -> dict[str, Tensor]:
        """What all workers with the same layers have: everything, or what they do not share."""
        if self.share is None:
            return self.named()
        whole = {f"model.{name}": value for name, value in model_tensors(self.model).items()}
        return {name: value for name, value in whole.items() if has_values(value)}

    def named(self) -> dict[str, Tensor]:
        """All tensors of the state by name, not copied; of those that workers share, this one's pieces."""
        pieces = self.share.pieces | self.share.other_pieces if self.share else {}
        cut = self.share.shapes if self.share else {}
        whole = {name: value for name, value in model_tensors(self.model).items() if name not in cut}
        named = {f"model.{name}": value for name, value in (whole | pieces).items()}
        named |= {f"ema.{name}": tensor for name, tensor in self.ema.items()}
        for memory, values in self.memory.items():
            named |= {f"optimizer.{memory}.{name}": tensor for name, tensor in values.items()}
        return named


_HASHED = {"model": "weights", "optimizer": "optimizer", "ema": "ema", "feedback": "feedback"}


class StateHash:
    """Hashes the tensors of a state, one after another in the order of names."""

    def __init__(self) -> None:
        self._kinds = {kind: TensorHash() for kind in _HASHED}

    def add(self, name: str, tensor: Tensor) -> None:
        """Take the next tensor."""
        kind, _, rest = name.partition(".")
        self._kinds[kind].add(rest, tensor)

    def found(self) -> dict[str, str]:
        """The hashes of all tensors so far, of each kind of which there are any."""
        return {f"{_HASHED[kind]}_sha256": h.hexdigest() for kind, h in self._kinds.items() if h.count}


def hash_state(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """The hashes of the tensors of a state, which come in the order of names."""
    found = StateHash()
    for name, tensor in tensors:
        found.add(name, tensor)
    return found.found()
