"""Implements `comm/group_source.py`: one group for a run, or under our launcher a new one each generation."""

from __future__ import annotations

import functools
import itertools

import torch

from lockstep.comm.group import Group
from lockstep.comm.group_source import LeftOut
from lockstep.comm.rendezvous import choose_backend, join_world
from lockstep.elastic.launcher_link import LauncherLink
from lockstep.errors import GroupLost
from lockstep.spec.generation import Generation
from lockstep.spec.world import World

_trainings = itertools.count(1)


class WorkerGroups:
    """The groups of one worker, one after another; `next` gives the group of the next generation."""

    def __init__(self, world: World | None, backend: str, device: torch.device) -> None:
        self._world, self._backend, self._device = world, backend, device
        if world and backend != "mpi":
            self._backend = choose_backend(backend, world, device)
        self._link = _link(world) if world and world.launcher == "lockstep" else None
        self._training = next(_trainings)
        self._was_in = self._is_ready = self._has_given = False
        self.generation: Generation | None = None

    @property
    def is_elastic(self) -> bool:
        """Whether training goes on in a new group after one is lost."""
        return self._link is not None

    @property
    def joins(self) -> bool:
        """Whether this worker joins a job that may already be running."""
        return self._world is not None and self._world.joins

    @property
    def wants_to_move(self) -> bool:
        """Whether another generation is planned, which this worker should enter after its step."""
        return self._link is not None and self._link.wants_to_move

    @property
    def run(self) -> str | None:
        """The run's directory, once a worker has made it."""
        return self._link.run if self._link else None

    def next(self) -> Group:
        """The next group; it waits for a generation that this worker belongs to."""
        if self._link is None or self._world is None:
            return join_world(self._world, self._backend, self._device)
        if not self._is_ready:
            self._link.say("ready", training=self._training)
            self._is_ready = True
        if self._has_given:
            raise LeftOut
        while True:
            generation = self._link.wait(self._training)
            if generation is None:
                raise LeftOut
            if self._world.name not in generation.everyone:
                if self._was_in and self._world.name not in generation.spares:
                    raise LeftOut
                continue  # a spare waits for a loss
            try:
                group = self._link.form(generation, self._backend, self._device)
            except GroupLost:
                self._link.report_lost()
                continue
            self.generation, self._was_in = generation, True
            return group

    def drop(self, group: Group) -> None:
        """Leave a group that is lost."""
        group.abort()
        if self._link:
            self._link.leave()
            self._link.report_lost()

    def leave(self, group: Group) -> None:
        """Leave a group in good order, together with all its workers."""
        if self._link:
            self._link.leave()
        group.close()
        if self._world and self.generation:  # a giver of a node that leaves the job is done
            names = self.generation.workers + self.generation.spares
            self._has_given = self._world.name not in names

    def tell_job(self, run: str, identity: dict[str, object]) -> None:
        """Tell the job's coordinator the run's identity and directory."""
        if self._link:
            self._link.say("job", run=run, identity=identity)

    def ask_identity(self) -> dict[str, object] | None:
        """The identity of the job that this worker joins, if it has begun."""
        return self._link.ask_identity() if self._link else None

    def settle(self) -> None:
        """Report that this worker has the generation's groups and state: others may join after a step."""
        if self._link and self.generation:
            self._link.say("settled", generation=self.generation.number)

    def confirm(self) -> None:
        """Report that the generation has completed a step."""
        if self._link and self.generation:
            self._link.say("stepped", generation=self.generation.number)

    def tell_end(self, code: int, rank: int) -> None:
        """Report that the training is over for all workers."""
        if self._link:
            self._link.say("verdict", code=code, rank=rank, training=self._training)


@functools.cache
def _link(world: World) -> LauncherLink:
    return LauncherLink(world)
