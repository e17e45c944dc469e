"""Rounds: the points of a user's script at which all workers meet, counted; a lost worker's round is redone.

Each worker runs the whole script, so all come to the same rounds in the same order: the lanes of a step, an
evaluation, a save. Under our launcher a round that lost a worker is done again by the others. A worker that
joins, or a script that goes on from a checkpoint, passes over the rounds that are done already, with their
recorded results, and takes the state where the others are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from lockstep.comm.group import Group
from lockstep.comm.group_source import GroupSource, LeftOut
from lockstep.errors import GroupLost, LockstepError, SpecError, WorkersDiffer
from lockstep.lanes.cursor import Arrival, Cursor
from lockstep.lanes.state_tree import PackedState, broadcast_state

T = TypeVar("T")
Item = TypeVar("Item")


class Rounds:
    """The group of this worker, through all generations, and where the script is.

    `facts` must be the same on all workers; `pack` and `restore` give and take the whole state.
    """

    def __init__(
        self,
        groups: GroupSource,
        lanes: int,
        facts: Callable[[], dict[str, Any]],
        pack: Callable[[], PackedState],
        restore: Callable[[PackedState, str], None],
    ) -> None:
        self._groups, self._lanes = groups, lanes
        self._facts, self._pack, self._restore = facts, pack, restore
        self._group: Group | None = None
        self.cursor = Cursor()
        self.arrival: Arrival | None = None
        self.done = 0  # rounds completed by this worker, those that it passed over included
        self.moves = False  # whether all workers agreed to form another group
        self.entered = 0  # groups that this worker has been in
        self.is_mixed = True  # whether a worker of the group has not yet shown that it computes as the others
        self._is_new, self._is_broken = True, False
        self.on_enter: Callable[[Group], None] = lambda group: None  # called in every new group

    @property
    def group(self) -> Group:
        """The current group; the first use forms it."""
        self.start()
        assert self._group is not None
        return self._group

    def start(self) -> None:
        """Form the first group, unless there is one; that may bring a place to go on from."""
        if self._is_broken:
            raise LockstepError(
                "a loop over lanes or blocks was left before its end, by an error or a `break`, so this "
                "worker is not where the others are: loop to the end; after an error, end the script"
            )
        if self._group is None:
            self._enter_next()

    @property
    def wants_to_move(self) -> bool:
        """Whether this worker knows of a generation to move to."""
        return self._groups.wants_to_move

    def load(self, cursor: dict[str, Any], state: PackedState, source: str) -> None:
        """Go on from a saved state, once the script has come to where it was saved."""
        self.cursor = found = Cursor(**cursor)
        is_near = found.epoch < 0 and found.loader < 0
        self.arrival = Arrival(state, source, list(found.before), list(found.results), is_near)

    @property
    def is_far(self) -> bool:
        """Whether the script still has to come to the cursor's place."""
        return self.arrival is not None and not self.arrival.is_near

    def come_near(self) -> None:
        """The script has come to the cursor's place."""
        if self.arrival:
            self.arrival.is_near = True

    def record(self, kind: str, result: dict[str, float]) -> None:
        """Note the result of a round, for scripts that will pass over it."""
        self.cursor.results.append([kind, result])

    @property
    def steps(self) -> int:
        """Steps taken, as seen from where the script is: those still to be passed over do not count."""
        return self.cursor.step - (self.arrival.coming_steps if self.arrival else 0)

    def skip(self, kind: str) -> dict[str, float] | None:
        """The recorded result of the coming round, if it is done already; else None."""
        self.start()
        if self.arrival and (recorded := self.arrival.take(kind)) is not None:
            return recorded
        self.arrive()
        return None

    def arrive(self) -> None:
        """Take the state that was loaded or sent, if the script is where that state belongs."""
        if self.arrival and self.arrival.is_near:
            if self.arrival.results:
                raise LockstepError(
                    f"{self.arrival.source}: this script takes fewer steps, evaluations or saves with a "
                    "batch than the one that was saved: was it changed?"
                )
            self._restore(self.arrival.state, self.arrival.source)
            self.arrival = None

    def run(self, work: Callable[[Group], T]) -> T:
        """Run a round without anything for the user to compute."""

        def once(group: Group) -> Iterator[None]:
            yield from ()
            found.append(work(group))

        found: list[T] = []
        for _ in self.passes(once):
            pass
        return found[-1]

    def passes(self, work: Callable[[Group], Iterator[Item]]) -> Iterator[Item]:
        """Yield what `work` yields in this group; again in the next one, if a worker is lost meanwhile."""
        is_complete = False
        while True:
            group, is_lost = self.group, False
            try:
                yield from work(group)
                is_complete = True
                if self._groups.is_elastic and group.size > 1:
                    group.barrier()  # who passes it knows that all others have the results, too
            except GeneratorExit:
                self._is_broken = True  # by an error or a `break`, while the others wait
                raise
            except GroupLost:
                is_lost = True  # handled below: the handler's frames would keep the group's sockets open
            if not is_lost:
                break
            self._drop(group)
            if self._enter_next() > self.done:
                assert is_complete, "another worker completed a round without this one"
                break
            is_complete = False
        self.done += 1
        if group.rank == 0 and self._is_new:
            self._groups.confirm()
            self._is_new = False

    def _drop(self, group: Group) -> None:
        """Leave a lost group; an error if no other can follow."""
        if not self._groups.is_elastic:
            group.abort()
            raise GroupLost(
                f"worker {group.rank} of {group.size} lost contact with another, which ended or cannot be "
                "reached: see what that one printed. Under `lockstep launch` the others would go on; "
                "a script that saves goes on from its last file"
            )
        self._groups.drop(group)

    def meet(self) -> None:
        """Let workers that wait join the group, if all agreed to it in the last step."""
        self.start()
        self.arrive()
        if self.moves:
            self.moves = False
            self._groups.leave(self.group)
            self._enter_next()

    def end(self) -> None:
        """The script is done with its workers; those that wait to join are told."""
        if self._group is not None and not self._is_broken:
            rank = self._group.rank
            with suppress(GroupLost, RuntimeError, OSError):
                self._groups.leave(self._group)
                self._groups.tell_end(0, rank)

    def _enter_next(self) -> int:
        """Form the next group and agree in it; gives the number of rounds that the foremost has completed."""
        while True:
            is_lost = False
            try:
                group = self._groups.next()
            except LeftOut:
                raise SystemExit(0) from None  # the others go on; the launcher says so
            try:
                done = self._agree(group)
            except GroupLost:
                is_lost = True
            if not is_lost:
                self._group, self._is_new, self.moves = group, True, False
                self.entered += 1
                self.on_enter(group)
                self._groups.settle()
                return done
            self._drop(group)

    def _agree(self, group: Group) -> int:
        """Compare what must be equal, and send the state to workers that have none."""
        if group.size > self._lanes:
            raise SpecError(
                f"{group.size} workers are more than lanes={self._lanes}: every worker needs a lane of its "
                "own; more lanes are another training"
            )
        mine = {"facts": self._facts(), "done": self.done if self.entered else -1}
        answers = [json.loads(text) for text in group.all_gather_bytes(json.dumps(mine).encode())]
        for rank, answer in enumerate(answers):
            compare_facts(answers[0]["facts"], answer["facts"], rank)
        done = [int(answer["done"]) for answer in answers]
        source = done.index(max(done))
        is_late = self.entered == 0 and group.rank != source
        if group.size > 1 and min(done) < 0:
            self.is_mixed = True
            self._send_state(group, source, takes=is_late)
        if is_late:
            self.done = max(*done, 0)
        return max(*done, 0)

    def _send_state(self, group: Group, source: int, takes: bool) -> None:
        """Send the state and the cursor of one worker to those that have none."""
        is_source = group.rank == source
        waits = self.arrival if is_source else None
        state = (waits.state if waits else self._pack()) if is_source else None
        cursor, arrived = broadcast_state(group, source, self.cursor.dump(), state)
        if takes:
            self.load(cursor, arrived, f"worker {source}")


def compare_facts(ours: dict[str, Any], theirs: dict[str, Any], rank: int) -> None:
    """Raise an error if worker `rank` has other facts than worker 0, whose facts come first."""
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            raise WorkersDiffer(
                f"worker {rank} has {key}={theirs.get(key)}, worker 0 has {ours.get(key)}: all workers must "
                "run the same script with the same packages on the same kind of machine"
            )
