"""The coordinator's decisions: who is a worker, when the next generation begins; no clock, no network."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.spec.generation import Change, Generation


@dataclass
class Member:
    """A worker that a launcher has started."""

    name: str
    node: int
    host: str
    age: int
    training: int = 0  # which training it is ready for; 0 while it starts
    leaves: bool = False  # its node leaves the job


class Membership:
    """The workers of all nodes; `next` returns a new generation if the current one no longer fits them."""

    def __init__(
        self,
        lanes: int,
        min_workers: int = 1,
        min_nodes: int = 1,
        sizes: tuple[int, ...] = (),
        is_split: bool = False,
    ) -> None:
        """`sizes` and `is_split` are as in a Job."""
        self._sizes, self._is_split = sizes, is_split
        self._lanes, self._min_workers, self._min_nodes = lanes, min_workers, min_nodes
        self._members: dict[str, Member] = {}
        self._changes: list[tuple[int, float, Change]] = []  # (first generation with it, time, change)
        self._ages = 0
        self._again = False
        self._here: set[str] = set()  # who has come to the current generation
        self._settled: set[str] = set()  # who has its groups and state
        self._is_begun = False  # whether the current generation has completed a step
        self.over = 0  # the last training that has ended, well or not
        self.current: Generation | None = None
        self.number = 0

    def add(self, name: str, node: int, host: str) -> None:
        """A worker was started."""
        self._ages += 1
        self._members[name] = Member(name, node, host, self._ages)

    def ready(self, name: str, training: int) -> bool:
        """A worker is ready to train; False if that training is already over, or its node leaves."""
        if name not in self._members or training <= self.over or self._members[name].leaves:
            return False
        self._members[name].training = training
        return True

    def remove(self, name: str, why: str, now: float) -> None:
        """A worker has ended; it counts as lost if there is a reason `why`."""
        member = self._members.pop(name, None)
        if member and why and self.current and name in self._holders:
            self._note(Change("lost", name, member.host, why), now)
            self._again = self._again or name in self.current.givers

    def leave(self, node: int, now: float) -> list[tuple[str, int]]:
        """A node's workers leave at the next step boundary; gives those that wait, and their training."""
        leaving = [m for m in self._members.values() if m.node == node and not m.leaves]
        for member in leaving:
            member.leaves = True
            if self.current and member.name in self.current.workers:
                self._note(Change("left", member.name, member.host), now)
        at_work = self._holders if self.current and self.current.training == self._training else ()
        return [(m.name, m.training) for m in leaving if m.name not in at_work]

    def finish(self, training: int) -> None:
        """A training is over: no worker can begin it any more."""
        self.over = max(self.over, training)

    def come(self, name: str) -> None:
        """A worker has come to the current generation; once all have, they form its groups."""
        self._here.add(name)

    def settle(self, name: str) -> None:
        """A worker has the groups and the state of the current generation, and goes on to a step."""
        self._settled.add(name)

    def renew(self) -> None:
        """Form the same group again: its workers lost each other, and all of them live."""
        self._again = True

    def next(self, now: float) -> Generation | None:
        """The next generation, if one is needed and enough workers are ready; else None."""
        if self._training <= self.over or self._waits():
            return None
        able, current = self._able(), self.current
        if len(able) < self._min_workers:
            return None
        is_same = current and current.training == self._training and current.workers == _names(able)
        if (is_same and not self._again) or (self._is_forming and self._can_plan):
            return None
        return self._publish(able, now)

    def halt(self, now: float) -> Generation | None:
        """A last generation of the remaining workers, which save their state and stop."""
        able = self._able() if self._training > self.over else []
        return self._publish(able, now, halt=True) if able else None

    @property
    def is_short(self) -> bool:
        """Whether training waits because too few workers are ready; False while others still come to it."""
        return self._training > self.over and not self._waits() and 0 < len(self._able()) < self._min_workers

    @property
    def changes(self) -> tuple[Change, ...]:
        """All changes since the last completed step."""
        return tuple(change for _, _, change in self._changes)

    @property
    def shortage(self) -> str:
        """The changes, and how many workers are left of the minimum, as text."""
        left = f"{len(self._able())} of at least {self._min_workers} are left"
        return "; ".join([*map(str, self.changes), left])

    @property
    def _training(self) -> int:
        """The latest training that any worker is in, or is ready for."""
        return max((m.training for m in self._members.values()), default=0)

    def _able(self) -> list[Member]:
        """Workers that can take part, by rank; the coordinator's node first, as the run's files are there."""
        training = self._training
        able = [m for m in self._members.values() if m.training == training and not m.leaves]
        able = sorted(able, key=lambda m: (m.node, m.age))[: self._lanes]
        return able[: next((size for size in self._sizes if size <= len(able)), len(able))]

    @property
    def _holders(self) -> tuple[str, ...]:
        """Who may have a part of the state: givers, too, until a step shows that the others have theirs."""
        if self.current is None:
            return ()
        return self.current.workers if self._is_begun else self.current.everyone

    @property
    def _can_plan(self) -> bool:
        """Whether the current workers can go on to another generation after a step: none of them is lost."""
        current = self.current
        if current is None or current.training != self._training or self._again:
            return False
        return {*current.workers} <= {*self._members}

    @property
    def _is_forming(self) -> bool:
        """Whether all have come to the current generation, and not all have its groups and state yet.

        A plan waits until they have: else some would leave for the next generation while they form this
        one, and those who have formed it already would wait for them in it.
        """
        current = self.current
        if current is None or not {*current.everyone} <= self._here:
            return False
        return not {*current.workers} <= self._settled

    def _waits(self) -> bool:
        """Whether to wait: at the start for all workers, at a further training for those of the last one."""
        if self.current is None:
            nodes = {m.node for m in self._members.values()}
            return len(nodes) < self._min_nodes or any(not m.training for m in self._members.values())
        training = self._training
        if training == self.current.training:
            return False
        earlier = [self._members[name] for name in self.current.workers if name in self._members]
        return any(m.training < training for m in earlier)

    def _publish(self, able: list[Member], now: float, halt: bool = False) -> Generation:
        current, training = self.current, self._training
        before = set(current.workers) if current and current.training == training else None
        if before is not None:
            for m in able:
                if m.name not in before:
                    self._note(Change("joined", m.name, m.host), now)
        planned = self._can_plan and not halt
        gives = self._is_split and before is not None and not halt
        holders = [self._members[name] for name in self._holders if gives and name in self._members]
        givers = [m for m in holders if m not in able]
        ready = [m for m in self._members.values() if m.training == training]
        self.number += 1
        self.current = Generation(
            self.number,
            training,
            _names(able),
            tuple(m.node for m in (*able, *givers)),
            planned,
            halt,
            self._changes[0][1] if self._changes else now,
            self.changes,
            _names([m for m in ready if m not in able and not m.leaves]),
            _names(givers),
        )
        self._again = self._is_begun = False
        self._here, self._settled = set(), set()
        return self.current

    def confirm(self, number: int) -> None:
        """A generation has completed a step, and its changes are reported: forget them."""
        self._is_begun = self._is_begun or number == self.number
        self._changes = [row for row in self._changes if row[0] > number]

    def _note(self, change: Change, now: float) -> None:
        self._changes.append((self.number + 1, now, change))


def _names(members: list[Member]) -> tuple[str, ...]:
    return tuple(m.name for m in members)
