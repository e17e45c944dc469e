"""The audit: a random lane and a random slice of a step's sums are computed a second time, by other workers.

Every bit is compared. Workers agree in every bit, so a difference is a fault of memory, processor or GPU,
which nothing else would show. It is found before the step is committed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from lockstep.comm.group import Group
from lockstep.comm.reducer import Reducer
from lockstep.comm.tree import LaneTree, worker_lanes
from lockstep.data.loader import Lanes
from lockstep.errors import AuditFailed
from lockstep.kernels import random
from lockstep.lower.lane_by_lane import LaneByLane, LaneOutput
from lockstep.models.tensors import tensors_sha256

_KEPT = "the step was not applied, and the state before it is kept"


@dataclass
class Audit:
    """Audits one step in `every`; `read` returns any lanes of the current step, `who` names this worker."""

    every: int
    seed: int
    lanes: int
    group: Group
    lowered: LaneByLane
    read: Callable[[range], Lanes]
    who: str
    _kept: tuple[range, list[Tensor]] | None = None  # lanes and results of the audited subtree, if it is here
    _reducer: Reducer | None = None  # of a step with an audited slice

    def is_due(self, step: int) -> bool:
        return self.every > 0 and (step + 1) % self.every == 0

    def begin(self, step: int, reducer: Reducer) -> None:
        """Start a step; if it is audited, let the reducer keep one worker's slice of its sums."""
        self._reducer = None
        if self.is_due(step) and self.group.size > 1:
            self._reducer = reducer
            reducer.watch(random.key("audited slice", self.seed, step) % (1 << 32))

    def watch(self, step: int, first: int, output: LaneOutput) -> None:
        """Keep a copy of the audited lane's results, since the lane tree writes into them."""
        covered = range(first, first + (1 << output.height))
        if self.is_due(step) and self._lane(step) in covered:
            self._kept = covered, [tensor.clone() for tensor in self._tensors(output)]

    def check(self, step: int) -> None:
        """Compute lane and slice again on other workers; if a bit differs, all workers fail."""
        if self.is_due(step):
            self._check_lane(step)
        if self._reducer:
            self._check_slice(step, self._reducer)

    def _check_slice(self, step: int, reducer: Reducer) -> None:
        """The worker after a slice's owner sums it again; every worker must have received these bits."""
        owner, arrived, again = reducer.find_slice()
        mine = [self.who, *self._hashes([arrived, again])]
        answers = [json.loads(text) for text in self.group.all_gather_bytes(json.dumps(mine).encode())]
        second, _, right = answers[(owner + 1) % self.group.size]
        for rank in (owner, *range(self.group.size)):
            if answers[rank][1] != right:
                did = "summed" if rank == owner else f"received from {answers[owner][0]}"
                raise AuditFailed(
                    f"step {step}: {answers[rank][0]} {did} other bits of a slice of the gradients than "
                    f"{second} finds from the same parts: the memory or processor of one of them is faulty; "
                    f"{_KEPT}"
                )

    def _check_lane(self, step: int) -> None:
        group, lane = self.group, self._lane(step)
        owner = next(r for r in range(group.size) if lane in worker_lanes(self.lanes, group.size, r))
        kept, self._kept = self._kept, None
        told = json.dumps([kept[0].start, len(kept[0])] if kept else []).encode()
        covered = range(0)
        for first, count in filter(None, map(json.loads, group.all_gather_bytes(told))):
            covered = range(first, first + count)
        second = (owner + 1) % group.size
        mine: list[list[str]] = [[], []]
        if kept:
            mine[0] = self._hashes(kept[1])
        if group.rank == second:
            mine[1] = self._hashes(self._compute(covered, step))
        message = json.dumps([self.who, *mine]).encode()
        answers = [json.loads(text) for text in group.all_gather_bytes(message)]
        for name, a, b in zip(self._names(), answers[owner][1], answers[second][2], strict=True):
            if a != b:
                raise AuditFailed(
                    f"step {step}: lane {lane} gave other bits on {answers[owner][0]} than on "
                    f"{answers[second][0]}, first in {name}: the memory or processor of one of them is "
                    f"faulty; {_KEPT}"
                )

    def _lane(self, step: int) -> int:
        return random.key("audit", self.seed, step) % self.lanes

    def _compute(self, covered: range, step: int) -> list[Tensor]:
        """The sum over the covered lanes, in lane-tree order; as many at a time as this worker owns."""
        tree, own = LaneTree(covered.start), worker_lanes(self.lanes, self.group.size, self.group.rank)
        most = 1 << (len(own).bit_length() - 1)
        for first in range(covered.start, covered.stop, most):
            part = range(first, min(first + most, covered.stop))
            for output in self.lowered.run(self.read(part), step):
                tree.add(self._tensors(output), output.height)
        return tree.root()[1]

    def _tensors(self, output: LaneOutput) -> list[Tensor]:
        return [*output.grads, output.loss, *output.float_buffers]

    def _names(self) -> Sequence[str]:
        grads = [f"the gradient of '{name}'" for name in self.lowered.params]
        return [*grads, "the loss", *(f"buffer '{name}'" for name in self.lowered.float_names())]

    @staticmethod
    def _hashes(tensors: list[Tensor]) -> list[str]:
        return [tensors_sha256({"": tensor})[:16] for tensor in tensors]
