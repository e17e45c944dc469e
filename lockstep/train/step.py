"""One step: lanes, lane tree, clipping, then one commit of everything.

A gradient's way: backward → lane tree → optimizer. Nothing of the state changes before all lanes are
summed and found finite, so a step that fails can simply be run again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.comm.tree import LaneTree
from lockstep.data.loader import Lanes
from lockstep.errors import LockstepError, NumericsError
from lockstep.spec import Run
from lockstep.train import optimizer as rules
from lockstep.train.clip import clip_gradients, gradient_norm
from lockstep.train.lane import LaneByLane
from lockstep.train.schedule import learning_rate
from lockstep.train.state import TrainState, float_state


@dataclass(frozen=True)
class StepResult:
    """What a step reports; reduced over all lanes."""

    loss: float
    correct: int
    lr: float


class Step:
    """Runs steps of a Run on a TrainState."""

    def __init__(self, run: Run, state: TrainState, lowered: LaneByLane, steps_per_epoch: int) -> None:
        self._run, self._state, self._lowered = run, state, lowered
        self._steps_per_epoch = steps_per_epoch
        self._total_steps = steps_per_epoch * run.train.epochs
        self._ints_checked = False

    def __call__(self, lanes: Lanes) -> StepResult:
        """Compute and commit one step."""
        tree, ints, logits = LaneTree(), None, []
        for output in self._lowered.run(lanes, self._state.step):
            tree.add([output.loss, *output.grads, *output.float_buffers], output.height)
            logits.append(output.logits)
            ints = self._agree(ints, output.int_buffers)
        self._ints_checked = True
        loss, *rest = tree.mean()
        num_params = len(self._lowered.params)
        grads, floats = rest[:num_params], rest[num_params:]
        clip, norm = self._run.train.clip, loss
        if clip:
            norm = gradient_norm(dict(zip(self._lowered.params, grads, strict=True)))
        value = self._check_finite([loss, norm], [*grads, *floats], lanes)
        if clip:
            clip_gradients(grads, norm, clip)
        lr = self._commit(grads, floats, ints or [])
        correct = int((torch.cat(logits).argmax(1) == lanes.labels).sum())
        return StepResult(value, correct, lr)

    @torch.no_grad()
    def _commit(self, grads: list[Tensor], floats: list[Tensor], ints: list[Tensor]) -> float:
        run, state = self._run, self._state
        lr = learning_rate(
            run.schedule, run.optimizer.lr, state.step, self._total_steps, self._steps_per_epoch
        )
        params = [p.detach() for p in self._lowered.params.values()]
        rules.update(run.optimizer, lr, state.step, params, grads, state.memory)
        for buffer, value in zip(self._lowered.buffers(), [*floats, *ints], strict=True):
            buffer.copy_(value)
        if run.train.ema:
            self._average(run.train.ema)
        state.step += 1
        state.step_in_epoch += 1
        return lr

    def _average(self, decay: float) -> None:
        """Averaged weights: d·a + (1−d)·w, with a shorter memory in the first steps."""
        decay = min(decay, (1 + self._state.step) / (10 + self._state.step))
        averages = list(self._state.ema.values())
        torch._foreach_mul_(averages, decay)
        torch._foreach_add_(
            averages, torch._foreach_mul(list(float_state(self._state.model).values()), 1.0 - decay)
        )

    def _check_finite(self, scalars: list[Tensor], tensors: list[Tensor], lanes: Lanes) -> float:
        """Stop before the commit if anything is not finite; gives the first of `scalars`, the loss."""
        largest = torch._foreach_norm([tensor for tensor in tensors if tensor.numel()], float("inf"))
        value, *bounds = torch.stack([*scalars, *(norm.float() for norm in largest)]).tolist()
        if all(map(math.isfinite, (value, *bounds))):
            return float(value)
        where = self._lowered.first_bad(lanes, self._state.step)
        raise NumericsError(
            f"step {self._state.step}: not finite: {where} (loss {value:g}); the step was not taken: lower "
            f"optimizer.lr={self._run.optimizer.lr:g}, set train.clip=1 or lengthen schedule.warmup_epochs"
        )

    def _agree(self, first: list[Tensor] | None, now: list[Tensor]) -> list[Tensor]:
        """Integer buffers must be the same in every lane; looked at in the first step of a process."""
        if first is None:
            return now
        if not self._ints_checked:
            for name, a, b in zip(self._lowered.int_names(), first, now, strict=True):
                if not torch.equal(a, b):
                    raise LockstepError(
                        f"buffer '{name}' is an integer and differs between lanes, so it has no mean: "
                        "make it a function of the step, or a float"
                    )
        return first
