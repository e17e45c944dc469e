"""What the parts of a session share: device, lanes, seed, the objects that are set up, rounds, progress."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lockstep
from lockstep.comm.group import Group
from lockstep.comm.group_source import GroupSource
from lockstep.errors import LockstepError, WorkersDiffer
from lockstep.lanes.buffers import Buffers
from lockstep.lanes.objects import Objects
from lockstep.lanes.progress import Progress
from lockstep.lanes.rounds import Rounds
from lockstep.lanes.step_reduction import Means, StepReduction
from lockstep.measure.machine_fingerprint import fingerprint

LanesOf = Callable[[Any], Iterator[Any]]  # of a batch, by the present step


class Script:
    """One worker's copy of the user's script, as loaders, steps and evaluations know it."""

    def __init__(
        self, groups: GroupSource, device: torch.device, lanes: int, seed: int, trace: Path | None
    ) -> None:
        self.device, self.lanes, self.seed = device, lanes, seed
        self.objects, self._trace = Objects(device), trace
        self.rounds = Rounds(groups, lanes, self.facts, self.objects.pack, self.objects.restore)
        self.progress = Progress(self.rounds, device, seed)
        self._lanes_of: LanesOf | None = None
        self._reductions: dict[tuple[Any, ...], StepReduction] = {}

    @property
    def buffers(self) -> Buffers:
        """The buffers of all modules."""
        return self.objects.buffers

    def lanes_of(self, batch: Any) -> Iterator[Any]:
        """The lanes of a batch, for the present step."""
        if self._lanes_of is None:
            raise LockstepError("loop over a batch's lanes inside `with session.step() as step`")
        return self._lanes_of(batch)

    def begin_step(self, lanes_of: LanesOf) -> None:
        """Begin a step, which gives the lanes of a batch; only one at a time."""
        if self._lanes_of is not None:
            raise LockstepError(
                "session.step: a step inside another one; end the first before the next begins"
            )
        self._lanes_of = lanes_of

    def end_step(self) -> None:
        """End the present step."""
        self._lanes_of = None

    def reduction(
        self, group: Group, params: list[Tensor], names: list[str], numbers: list[Tensor]
    ) -> StepReduction:
        """The reduction of these gradients and numbers; made once for each group, after all have agreed."""
        mine = [[f"{tuple(p.shape)} {p.dtype}" for p in params], names]
        text = hashlib.sha256(json.dumps(mine).encode()).digest()
        for rank, theirs in enumerate(group.all_gather_bytes(text)):
            if theirs != text:
                raise WorkersDiffer(
                    f"worker {rank} reduces other gradients or logs other names than worker {group.rank}: "
                    "every worker's lanes must log the same names"
                )
        key = self.rounds.entered, tuple(map(id, params)), tuple(names)
        if key not in self._reductions:
            for old in [k for k in self._reductions if k[0] != key[0]]:
                self._reductions.pop(old).close()
            like = Means(params, numbers, self.buffers.floats(), self.buffers.ints())
            # no overlap: a lane may have several backward passes
            self._reductions[key] = StepReduction(
                group, self.lanes, like, self.buffers.int_names(), overlap=False
            )
        return self._reductions[key]

    def trace(self, values: dict[str, float]) -> None:
        """Append a step's values and the hash of the state to the trace, if there is one."""
        if self._trace and self.rounds.group.rank == 0:
            row = {"step": self.rounds.cursor.step, **values, "state_sha256": self.objects.pack().sha256()}
            with self._trace.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        """End all reductions, and tell the launcher that this script is done."""
        for reduction in self._reductions.values():
            reduction.close()
        self._reductions.clear()
        self.rounds.end()

    def facts(self) -> dict[str, Any]:
        """What all workers must have in common."""
        return {
            "lockstep": lockstep.__version__,
            "lanes": self.lanes,
            "seed": self.seed,
            "threads": torch.get_num_threads(),
            "objects": self.objects.describe(),
            **fingerprint(self.device),
        }
