"""A session: a training script of the user's own, whose bits do not depend on its number of workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.comm.everywhere import everywhere
from lockstep.comm.group import Group
from lockstep.errors import CheckpointError, IdentityError, ModelError
from lockstep.kernels.keyed_seed import seed_all
from lockstep.lanes.evaluation import BlockSums
from lockstep.lanes.lane_loader import LaneLoader
from lockstep.lanes.lane_step import LaneStep
from lockstep.lanes.saved_state import SavedState, read_state, write_state
from lockstep.lanes.script import Script
from lockstep.lanes.state_tree import prove_equal
from lockstep.models.tensors import model_tensors, tensors_sha256

Collate = Callable[[list[Any]], Any]


class Session:
    """One worker's part of a training script; `lockstep.lanes.join` makes it."""

    def __init__(self, script: Script, rank: int = 0, workers: int = 1) -> None:
        """`rank` and `workers` are those before the first group is formed."""
        self.script, self._rounds, self._first = script, script.rounds, (rank, workers)
        self.device, self.lanes, self.seed = script.device, script.lanes, script.seed
        seed_all(self.device, "session", self.seed)

    def setup(self, *objects: Any) -> Any:
        """Take modules, optimizers, schedules and whatever else has a `state_dict`; gives them back.

        Give it everything that changes during training, before the first loop; a module before its optimizer.
        Modules are moved to the session's device. All workers start from the state of worker 0.
        """
        if self._rounds.entered:
            raise ModelError("session.setup: call it for everything before the first loop")
        for thing in objects:
            self.script.objects.add(thing)
        return objects[0] if len(objects) == 1 else objects

    def epochs(self, number: int, checkpoint: str | Path = "", every: int = 0) -> Iterator[int]:
        """The epochs of a training, from where it stopped on; at the end all workers compare their state.

        With `checkpoint`, a path, it goes on from that file if there is one, and saves there after each epoch
        and, if given, after `every` so many steps.
        """
        if checkpoint:
            self.load(checkpoint, missing_ok=True)
        if checkpoint and every:
            self.script.progress.on_batch = partial(self._save_every, checkpoint, every)
        for epoch in self.script.progress.epochs(number):
            yield epoch
            if checkpoint:
                self.save(checkpoint)
        self.script.progress.on_batch = lambda: None
        if self._rounds.skip("end") is None:
            self._rounds.run(self._prove_state)
            self._rounds.record("end", {})

    def loader(
        self,
        dataset: Any,
        batch: int,
        *,
        shuffle: bool = True,
        collate: Collate | None = None,
        processes: int = 0,
    ) -> LaneLoader:
        """Batches of `batch` samples in a fixed order; `processes` read ahead. Loop over each in a step."""
        return LaneLoader(self.script, dataset, batch, shuffle=shuffle, collate=collate, processes=processes)

    def step(self, *optimizers: Any, scaler: Any = None) -> LaneStep:
        """A step of these optimizers, by default of all: `with session.step() as step`."""
        known = self.script.objects.optimizers
        for optimizer in optimizers:
            if not any(optimizer is own for own in known):
                raise ModelError(f"session.step: give {type(optimizer).__name__} to session.setup first")
        if not known:
            raise ModelError("session.step: give an optimizer to session.setup first")
        if scaler is not None and not any(scaler is own for own in self.script.objects.named.values()):
            raise ModelError("session.step: give the gradient scaler to session.setup first")
        return LaneStep(self.script, optimizers or known, scaler)

    def evaluate(
        self, dataset: Any, batch: int, *, collate: Collate | None = None, processes: int = 0
    ) -> BlockSums:
        """Blocks of a data set and sums over them: `for x, y in sums: sums.add(right=…, count=…)`."""
        return BlockSums(self.script, dataset, batch, collate, processes)

    def save(self, path: str | Path) -> None:
        """Save the whole state and where the script is; worker 0 writes, once all are found equal."""
        if self._rounds.skip("save") is None:
            self._rounds.run(partial(self._write, Path(path)))
            self._rounds.cursor.saved = self.steps  # not before: who joins meanwhile takes part in it
            self._rounds.record("save", {})

    def load(self, path: str | Path, missing_ok: bool = False) -> bool:
        """Go on from a file that `save` wrote, with any number of workers; call it after `setup`.

        The script runs from its beginning and passes over what is done already: `session.epochs` and loaders
        begin where the file was saved. Gives whether there was a file.
        """
        if self._rounds.entered:
            raise CheckpointError("session.load: call it before the first loop")
        if not Path(path).exists() and missing_ok:
            return False
        saved = read_state(Path(path))
        for key, mine in self.script.facts().items():
            if key != "objects" and saved.facts.get(key) != mine:
                raise IdentityError(
                    f"{path} was trained with {key}={saved.facts.get(key)}, and this script has "
                    f"{key}={mine}: it would not end with the same bits"
                )
        if saved.facts["objects"] != self.script.objects.describe():
            odd = sorted(set(saved.facts["objects"]) ^ set(self.script.objects.describe()))
            raise CheckpointError(
                f"{path} has the state of other objects than were set up ({'; '.join(odd[:4])}): give the "
                "same to session.setup, in the same order"
            )
        self._rounds.load(saved.cursor, saved.state, str(path))
        return True

    def hash(self, module: nn.Module | None = None) -> str:
        """SHA-256 of a module's parameters and buffers; of the whole state by default."""
        return (
            self.script.objects.pack().sha256() if module is None else tensors_sha256(model_tensors(module))
        )

    @property
    def rank(self) -> int:
        """This worker's number now; under our launcher it changes when workers are lost."""
        return self._rounds.group.rank if self._rounds.entered else self._first[0]

    @property
    def workers(self) -> int:
        """The number of workers now."""
        return self._rounds.group.size if self._rounds.entered else self._first[1]

    @property
    def is_main(self) -> bool:
        """Whether this worker is the one to print and to write files."""
        return self.rank == 0

    @property
    def steps(self) -> int:
        """Steps taken so far."""
        return self._rounds.steps

    def close(self) -> None:
        """End the session; at the end of a script this happens by itself."""
        self.script.close()

    def _save_every(self, path: str | Path, every: int) -> None:
        if self.steps // every > self._rounds.cursor.saved // every:
            self.save(path)

    def _write(self, path: Path, group: Group) -> None:
        """Compare all workers' states, then let worker 0 write; one round, as all of it is done again."""

        def write() -> None:
            if group.rank == 0:
                cursor = {**self._rounds.cursor.dump(), "saved": self.steps}
                write_state(path, SavedState(self.script.objects.pack(), cursor, self.script.facts()))

        self._prove_state(group)
        everywhere(group, write)

    def _prove_state(self, group: Group) -> None:
        """Raise an error if workers have different states."""
        prove_equal(group, self.script.objects.pack(), f"step {self.steps}")
