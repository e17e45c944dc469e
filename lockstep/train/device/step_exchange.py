"""The means of a step on the device over the lanes of all workers, from and to flat tables.

A gradient takes the path of `step.py`: lane tree → bucket → group → lane tree. Gradients travel as one flat
table; those that are compressed travel lane by lane, as tensors of the model by their names.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.comm.bucket import ReducedTensor
from lockstep.comm.group import Group
from lockstep.comm.reducer import Reducer
from lockstep.spec import Launch
from lockstep.train.device.device_step import DeviceStep


class StepExchange:
    """Sums the roots of a `DeviceStep` over all workers."""

    def __init__(self, step: DeviceStep, group: Group, launch: Launch) -> None:
        self._step, feedback = step, step.state.feedback
        self.sums = torch.zeros_like(step.grads)  # the means, as the step commits them
        grads, rest = step.parts(step.grads)
        wire = torch.bfloat16 if step.run.train.wire == "bf16" else None
        entries, self._lanes = [ReducedTensor(grads, wire)], list[list[Tensor]]()
        if feedback:  # from the last layer to the first, as through the host
            like = [(name, p.detach()) for name, p in reversed(step.params.items())]
            entries = [ReducedTensor(p, None, name) for name, p in like]
            self._lanes = [[torch.empty_like(p) for _, p in like] for _ in step.roots]
        entries += [ReducedTensor(rest), ReducedTensor(step.grads[:2])]
        self._reducer = Reducer(
            group, step.run.train.lanes, entries, launch.bucket_mb, overlap=False, feedback=feedback
        )

    def compute(self) -> None:
        """This worker's lanes, and what is exchanged of them."""
        self._step.compute()
        for root, tensors in zip(self._step.roots, self._lanes, strict=False):
            self._step.split(root, tensors[::-1])

    def exchange(self, stop: bool, move: bool) -> Tensor:
        """Sum over all workers; returns how many wish to stop, and to move."""
        return self._sum(self._step.grads.new_tensor([stop, move]), self.compresses)

    def run_alone(self, compresses: bool) -> None:
        """A whole step of the only worker, whose sums are rounded or compressed."""
        self.compute()
        self._sum(torch.zeros_like(self._step.grads[:2]), compresses)
        self._step.commit(self.sums, 1.0)
        self._reducer.commit(self._step.held)

    @property
    def compresses(self) -> bool:
        """Whether steps of the current epoch are compressed."""
        return self._step.state.epoch >= self._step.run.train.compress_after

    def _sum(self, wishes: Tensor, compresses: bool) -> Tensor:
        step, reducer = self._step, self._reducer
        reducer.begin(compresses)
        for number, (root, height) in enumerate(zip(step.roots, step.heights, strict=True)):
            grads, rest = step.parts(root)
            given = self._lanes[number] if self._lanes else [grads]
            reducer.add([*given, rest, wishes.clone()], height)
        *means, rest, wishes = reducer.finish()
        if self._lanes:
            step.join(means[::-1], self.sums)
        else:
            step.parts(self.sums)[0].copy_(means[0])
        step.parts(self.sums)[1].copy_(rest)
        return wishes

    def commit(self) -> None:
        """Remember what compression left out of the step, which is committed."""
        self._reducer.commit()

    @property
    def sent_bytes(self) -> int:
        """What this worker sent to others in the last step."""
        return self._reducer.sent_bytes

    def close(self) -> None:
        """End what the reducer has begun."""
        self._reducer.close()
