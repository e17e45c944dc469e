"""One worker's lanes of a step, added up one after another; then the means over the lanes of all workers.

A step of a user's own loop and a step under Lightning are both computed this way.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.group import Group
from lockstep.errors import LockstepError, NumericsError, WorkersDiffer
from lockstep.lanes.objects import Buffers
from lockstep.lanes.step_reduction import Buckets, Means, StepReduction, read_finite

USED, NUMBERS = 0, 1  # places in `Means.numbers`: which parameters got a gradient, and what lanes note


class Reductions:
    """The reductions that steps use; each is made once for its group, parameters and names of numbers."""

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self._made: dict[tuple[Any, ...], StepReduction] = {}

    def find(
        self, group: Group, entered: int, like: Means, names: Sequence[str], buffers: Buffers
    ) -> StepReduction:
        """The reduction for gradients and numbers like these, after all workers have agreed on them.

        `entered` counts the groups that this worker has been in; reductions of earlier ones are closed.
        """
        mine = [[f"{tuple(p.shape)} {p.dtype}" for p in like.grads], list(names)]
        text = hashlib.sha256(json.dumps(mine).encode()).digest()
        for rank, theirs in enumerate(group.all_gather_bytes(text)):
            if theirs != text:
                raise WorkersDiffer(
                    f"worker {rank} reduces other gradients or logs other names than worker {group.rank}: "
                    "every worker's lanes must log the same names"
                )
        key = entered, tuple(map(id, like.grads)), tuple(names)
        if key not in self._made:
            for old in [k for k in self._made if k[0] != entered]:
                self._made.pop(old).close()
            # no overlap: a lane may have several backward passes
            self._made[key] = StepReduction(
                group, self._lanes, like, buffers.int_names(), Buckets(overlap=False)
            )
        return self._made[key]

    def close(self) -> None:
        """End all reductions."""
        for reduction in self._made.values():
            reduction.close()
        self._made.clear()


class LaneSums:
    """Takes what each lane of one step gives, `add` by `add`; `finish` gives the means.

    Each lane begins with the buffers that the step began with, and without gradients. With `checks_ints`
    workers compare their integer buffers in every step, else only in the first.
    """

    def __init__(
        self,
        group: Group,
        reductions: Reductions,
        params: Sequence[Tensor],
        buffers: Buffers,
        entered: int,
        checks_ints: bool,
    ) -> None:
        self._group, self._reductions, self._entered = group, reductions, entered
        self._params, self._buffers, self._checks_ints = list(params), buffers, checks_ints
        self._before = [buffer.clone() for buffer in buffers.all()]
        self._reduction: StepReduction | None = None
        self._names: list[str] = []

    def add(self, names: Iterable[str], numbers: Tensor) -> None:
        """Take the gradients, the buffers and the numbers of the lane that was just computed."""
        params, named = self._params, list(names)
        used = torch.tensor([float(p.grad is not None) for p in params], device=numbers.device)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        floats = [buffer.clone() for buffer in self._buffers.floats()]
        ints = [buffer.clone() for buffer in self._buffers.ints()]
        if self._reduction is None:
            like, self._names = Means(params, [used, numbers], floats, ints), named
            self._reduction = self._reductions.find(self._group, self._entered, like, named, self._buffers)
            self._reduction.begin(self._checks_ints)
        elif self._names != named:
            odd = sorted(set(self._names) ^ set(named))
            raise LockstepError(
                f"a lane logged other names than the lane before ({', '.join(odd[:4])}): log the same names "
                "in every lane, in the same order"
            )
        self._reduction.add(grads, [used, numbers], floats, ints)
        for parameter in params:
            parameter.grad = None
        self.restore_buffers()

    def restore_buffers(self) -> None:
        """Give all buffers the values that the step began with."""
        self._buffers.restore(self._before)

    def finish(self) -> Means:
        """The means over all lanes of all workers; a collective."""
        assert self._reduction is not None
        means = self._reduction.finish()
        self._reduction.check_ints()
        return means


def refuse_not_finite(
    where: str, loss: Tensor, tensors: Sequence[Tensor], names: Callable[[], Sequence[str]]
) -> None:
    """Raise an error that names the first of these tensors that is not finite, if one is or the loss is."""
    (value,), is_finite, _ = read_finite([loss], tensors)
    if not is_finite:
        named = zip(names(), tensors, strict=True)
        bad = [name for name, tensor in named if not tensor.isfinite().all()]
        raise NumericsError(
            f"{where}: {[*bad, 'the loss'][0]} is not finite (loss {value:g}); the step was not applied: "
            "lower the learning rate or clip gradients"
        )
