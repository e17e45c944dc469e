"""What the parts of a session share: device, lanes, seed, the objects that are set up, rounds, progress."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import lockstep
from lockstep.comm.group_source import GroupSource
from lockstep.errors import LockstepError
from lockstep.lanes.lane_sums import Reductions
from lockstep.lanes.objects import Buffers, Objects
from lockstep.lanes.progress import Progress
from lockstep.lanes.rounds import Rounds
from lockstep.measure.hidden_state import HiddenState
from lockstep.measure.machine_fingerprint import fingerprint

_LOOKS = 3  # lanes after which modules are looked at: the first may fill caches
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
        self.reductions = Reductions(lanes)
        self._hidden: HiddenState | None = None

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

    def look_for_hidden_state(self) -> None:
        """After each of the first lanes: warn of what modules change outside of their state."""
        self._hidden = self._hidden or HiddenState(self.objects.modules, tensors=False)
        if self._hidden.looks < _LOOKS:
            for text in self._hidden.look():
                fix = "register it as a buffer, or count by session.steps; lanes.check tells more"
                warnings.warn(f"{text}, so every worker has its own: {fix}", stacklevel=2)

    def trace(self, values: dict[str, float]) -> None:
        """Append a step's values and the hash of the state to the trace, if there is one."""
        if self._trace and self.rounds.group.rank == 0:
            row = {"step": self.rounds.cursor.step, **values, "state_sha256": self.objects.pack().sha256()}
            with self._trace.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        """End all reductions, and tell the launcher that this script is done."""
        self.reductions.close()
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
