"""One step through the host: lanes, lane tree over all workers, clipping, and the update if all is finite.

A gradient's path: backward → lane tree → bucket → group → lane tree → optimizer. Nothing of the state
changes before all lanes are summed and found finite, so a step that fails can simply be run again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lockstep.comm.bucket import ReducedTensor
from lockstep.comm.group import Group
from lockstep.comm.reducer import BUCKET_MB, Reducer
from lockstep.data.loader import Lanes
from lockstep.errors import LockstepError, NumericsError
from lockstep.lower.lane_by_lane import LaneByLane
from lockstep.models.tensors import float_state, tensors_sha256
from lockstep.runs.train_state import TrainState
from lockstep.spec import Run
from lockstep.train import optimizer as rules
from lockstep.train.audit import Audit
from lockstep.train.clip import clip_gradients, gradient_norm

Requests = Callable[[], tuple[bool, bool]]  # this worker's: (stop, move to another generation)
_INTEGER = (
    "buffer '{}' is an integer and differs between {}, so it has no mean: make it a function of the step, "
    "or a float"
)


@dataclass(frozen=True)
class StepResult:
    """What a step reports; reduced over all lanes, so it is the same on every worker."""

    loss: float
    correct: int
    lr: float
    stop: bool = False  # whether any worker was asked to stop
    move: bool = False  # whether any worker knows of a generation to move to
    seconds: float = 0.0  # how long it took; 0: the time since the step before
    waited_s: float = 0.0  # how much of that was spent waiting for data


class NotFinite(Exception):
    """A step on the device was not taken, because its loss or a gradient is not finite."""

    def __init__(self, loss: float) -> None:
        self.loss = loss


class Step:
    """Runs steps of a Run on a TrainState."""

    def __init__(
        self,
        run: Run,
        state: TrainState,
        lowered: LaneByLane,
        steps_per_epoch: int,
        group: Group | None = None,
        *,
        bucket_mb: float = BUCKET_MB,
        overlap: bool = True,
    ) -> None:
        self._run, self._state, self._lowered = run, state, lowered
        self._steps_per_epoch = steps_per_epoch
        self._total_steps = steps_per_epoch * run.train.epochs
        self._group = group or Group()
        self._options = bucket_mb, overlap
        self._ints_checked = False
        self.audit: Audit | None = None

    def __call__(self, lanes: Lanes, stop: bool = False, move: bool = False) -> StepResult:
        """Compute and commit one step; `stop` and `move` ask all workers to leave after it."""
        reducer, num_params = self._reducer, len(self._lowered.params)

        def early(index: int, grad: Tensor) -> None:
            reducer.put(num_params - 1 - index, grad)

        reducer.begin()
        if self.audit:
            self.audit.begin(self._state.step, reducer)
        ints, seen, lane = None, 0, lanes.first
        requests = [torch.tensor(float(request), device=lanes.images.device) for request in (stop, move)]
        self._checks_ints = not self._ints_checked or self._state.step_in_epoch == 0
        for output in self._lowered.run(lanes, self._state.step, early if reducer.overlaps else None):
            labels = lanes.labels[seen : seen + len(output.logits)]
            seen += len(labels)
            correct = (output.logits.argmax(1) == labels).sum().float()
            if self.audit:
                self.audit.watch(self._state.step, lane, output)
            lane += 1 << output.height
            heads = [output.loss, correct, *(request.clone() for request in requests), *output.float_buffers]
            reducer.add([*reversed(output.grads), *heads], output.height)
            ints = self._agree(ints, output.int_buffers)
        means = reducer.finish()
        if self.audit:
            self.audit.check(self._state.step)
        self._agree_with_workers(ints or [])
        grads, (loss, right, *heads) = means[:num_params][::-1], means[num_params:]
        requests, floats = heads[:2], heads[2:]
        clip, norm = self._run.train.clip, loss
        if clip:
            norm = gradient_norm(dict(zip(self._lowered.params, grads, strict=True)))
        scalars = [loss, right, *requests, norm]
        value, share, stops, moves = self._check_finite(scalars, [*grads, *floats], lanes)
        self._group.check()
        if clip:
            clip_gradients(grads, norm, clip)
        lr = self._commit(grads, floats, ints or [])
        return StepResult(value, round(share * self._run.train.lanes), lr, stops > 0, moves > 0)

    @cached_property
    def _reducer(self) -> Reducer:
        """Made by the first step through the host; steps that stay on the device use another reducer."""
        return Reducer(self._group, self._run.train.lanes, self._entries(), *self._options)

    def close(self) -> None:
        """End the reducer's background thread."""
        if "_reducer" in vars(self):
            self._reducer.close()

    def _entries(self) -> list[ReducedTensor]:
        """What a step reduces: gradients from the last layer to the first, then loss, counts and buffers."""
        wire = torch.bfloat16 if self._run.train.wire == "bf16" else None
        params = [p.detach() for p in reversed(self._lowered.params.values())]
        grads = [ReducedTensor(p, wire if p.dtype == torch.float32 else None) for p in params]
        scalar = torch.zeros((), device=params[0].device)
        return [*grads, *[ReducedTensor(scalar)] * 4, *map(ReducedTensor, self._lowered.float_buffers())]

    @torch.no_grad()
    def _commit(self, grads: list[Tensor], floats: list[Tensor], ints: list[Tensor]) -> float:
        run, state = self._run, self._state
        steps = self._steps_per_epoch
        # not `state.step`: epochs may have been longer before the data was changed
        done = state.epoch * steps + state.step_in_epoch
        lr = run.schedule.rate(run.optimizer.lr, done, self._total_steps, steps)
        params = [p.detach() for p in self._lowered.params.values()]
        rules.update_params(run.optimizer, lr, state.step, params, grads, state.memory)
        for buffer, value in zip(self._lowered.buffers(), [*floats, *ints], strict=True):
            buffer.copy_(value)
        if run.train.ema:
            self._average(run.train.ema)
        state.step += 1
        state.step_in_epoch += 1
        return lr

    def _average(self, decay: float) -> None:
        """Update the averaged weights: d·a + (1−d)·w, with a smaller d in the first steps."""
        decay = averaging(decay, self._state.step)
        averages = list(self._state.ema.values())
        torch._foreach_mul_(averages, decay)
        torch._foreach_add_(
            averages, torch._foreach_mul(list(float_state(self._state.model).values()), 1.0 - decay)
        )

    def _check_finite(self, scalars: list[Tensor], tensors: list[Tensor], lanes: Lanes) -> list[float]:
        """Raise before the commit if anything is not finite; returns `scalars` without the last, the norm."""
        values = torch.stack([*(scalar.double() for scalar in scalars), *_extremes(tensors)]).tolist()
        if all(map(math.isfinite, values)):
            return list(values[: len(scalars) - 1])
        self._group.check()
        raise self.not_finite(values[0], lanes)

    def not_finite(self, loss: float, lanes: Lanes) -> NumericsError:
        """The error of a step that was not taken because a value is not finite."""
        where = self._first_bad(lanes)
        return NumericsError(
            f"step {self._state.step}: not finite: {where} (loss {loss:g}); the step was not applied: "
            f"lower optimizer.lr={self._run.optimizer.lr:g}, set train.clip=1 or lengthen "
            "schedule.warmup_epochs"
        )

    def _first_bad(self, lanes: Lanes) -> str:
        """Where a value first stops being finite, on any worker."""
        found = self._lowered.first_bad(lanes, self._state.step) or ""
        everywhere = [text.decode() for text in self._group.all_gather_bytes(found.encode())]
        return next(filter(None, everywhere), "the sum over lanes")

    def _agree(self, first: list[Tensor] | None, now: list[Tensor]) -> list[Tensor]:
        """Integer buffers must be the same in every lane; checked in the first step of an epoch."""
        if first is None:
            return now
        if self._checks_ints:
            for name, a, b in zip(self._lowered.int_names(), first, now, strict=True):
                if not torch.equal(a, b):
                    raise LockstepError(_INTEGER.format(name, "lanes"))
        return first

    def _agree_with_workers(self, ints: list[Tensor]) -> None:
        """Integer buffers must also be the same on every worker."""
        if not self._checks_ints:
            return
        names = self._lowered.int_names()
        hashes = {name: tensors_sha256({name: value}) for name, value in zip(names, ints, strict=True)}
        for rank, text in enumerate(self._group.all_gather_bytes(json.dumps(hashes).encode())):
            differs = [name for name, value in json.loads(text).items() if value != hashes[name]]
            if differs:
                raise LockstepError(_INTEGER.format(differs[0], f"workers {self._group.rank} and {rank}"))
        self._ints_checked = True


def averaging(decay: float, step: int) -> float:
    """The share of the averaged weights that a step keeps: less in the first steps."""
    return min(decay, (1 + step) / (10 + step)) if decay else 0.0


def _extremes(tensors: list[Tensor]) -> list[Tensor]:
    """Numbers that are finite if and only if every element of the tensors is."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    if filled[0].is_cuda:
        return [norm.double() for norm in torch._foreach_norm(filled, float("inf"))]
    # a CPU takes ten times as long for that norm
    return [end.double() for tensor in filled for end in torch.aminmax(tensor)]
