"""Counts the epochs and batches of a script; one that goes on from a checkpoint begins where that is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from lockstep.errors import LockstepError
from lockstep.kernels.keyed_seed import seed_all
from lockstep.lanes.cursor import Cursor
from lockstep.lanes.rounds import Rounds


class Progress:
    """Counts epochs and batches, and passes over those that are done already.

    All generators are seeded anew at each place. So what a script draws between its steps is the same on all
    workers, and after it went on from a checkpoint.
    """

    def __init__(self, rounds: Rounds, device: torch.device, seed: int) -> None:
        self._rounds, self._device, self._seed = rounds, device, seed
        self._passes = -1  # over loaders, in this epoch
        self._is_looping = self._has_epochs = False
        self.on_batch: Callable[[], None] = lambda: None  # called between batches, before the place moves on

    def epochs(self, number: int) -> Iterator[int]:
        """The epochs that are left of `number`."""
        rounds = self._rounds
        if self._has_epochs:
            raise LockstepError("session.epochs: one loop over epochs in a script; join again for another")
        self._has_epochs = True
        rounds.start()
        if not rounds.is_far:
            rounds.meet()
            if rounds.cursor.epoch < 0:
                self._move(Cursor(0, before=rounds.cursor.results))
        while (epoch := rounds.cursor.epoch) < number:
            self._passes = -1
            if rounds.cursor.loader < 0:
                rounds.come_near()
            seed_all(self._device, "epoch", self._seed, epoch)
            yield epoch
            rounds.meet()
            self._move(Cursor(epoch + 1))
        cursor = rounds.cursor
        if rounds.is_far and (cursor.epoch > number or cursor.loader >= 0):
            raise LockstepError(
                f"the training was saved in epoch {cursor.epoch}, counted from 0, and this script has "
                f"{number}: give session.epochs as many as before, or more"
            )
        rounds.come_near()
        seed_all(self._device, "end", self._seed, number)

    def batches(self, length: int, data: str) -> Iterator[int]:
        """The batches that are left of the next pass over a loader; `data` says what it reads."""
        if self._is_looping:
            raise LockstepError("session.loader: loop over one loader at a time")
        rounds, self._passes = self._rounds, self._passes + 1
        mine, cursor, first = self._passes, rounds.cursor, 0
        if rounds.is_far:
            if mine < cursor.loader:
                return
            if cursor.data != data:
                raise LockstepError(
                    f"the training was saved with {cursor.data}, and now there are {data}: that would be "
                    "another training"
                )
            first = cursor.batch  # once more: its steps are passed over, with their results
        self._is_looping = True
        try:
            for number in range(first, length):
                self._begin(Cursor(cursor.epoch, mine, number, data))
                yield number
        finally:
            self._is_looping = False

    @property
    def epoch(self) -> int:
        """The epoch; outside of `epochs`, the number of the pass over a loader."""
        self._rounds.start()
        epoch = self._rounds.cursor.epoch
        return epoch if epoch >= 0 else self._passes + 1

    def _begin(self, place: Cursor) -> None:
        """Come to a place: the one that the script goes on from, or a new one."""
        rounds = self._rounds
        if rounds.is_far:
            rounds.come_near()
        else:
            rounds.meet()
            self.on_batch()
            self._move(place)
        seed_all(self._device, "batch", self._seed, place.epoch, place.loader, place.batch)

    def _move(self, place: Cursor) -> None:
        now = self._rounds.cursor
        place.step, place.saved, place.before = now.step, now.saved, place.before or now.before
        self._rounds.cursor = place
