"""MPI: process 0 broadcasts the weights, scatters the images, reduces the gradients, and takes the step.

Every process computes its share of the batch by the sequential C++.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

from lockstep.lab.baselines.baseline_task import SIDE, Array, BaselineTask, read_task
from lockstep.lab.baselines.contest import race
from lockstep.lab.baselines.cpp_network import CppNetwork, build_network


class MpiContestant:
    """One process; images and weights count only on process 0."""

    precision = "fp32"

    def __init__(self, task: BaselineTask) -> None:
        self._world = MPI.COMM_WORLD
        self._rank, size = self._world.Get_rank(), self._world.Get_size()
        library = Path(task.folder, "network.so")
        if self._rank == 0:
            build_network(library)
            self._images, self._labels = task.array("images"), task.array("labels").astype(np.int32)
        self._world.Barrier()
        self._network, self._task = CppNetwork(library, task.channels_last_weights()), task
        share = task.batch // size
        self._own = np.empty((share, 1, SIDE, SIDE), np.float32), np.empty(share, np.int32)
        self._sum = np.empty_like(self._network.weights) if self._rank == 0 else None
        self.predict = self._network.predict

    def warm_up(self) -> None:
        """All are ready."""
        self._world.Barrier()

    def train(self, order: Array) -> list[float]:
        return [self._step(ids) for epoch in order for ids in epoch]

    def _step(self, ids: Array) -> float:
        world, network, is_first = self._world, self._network, self._rank == 0
        world.Bcast(network.weights, 0)
        world.Scatter(self._images[ids] if is_first else None, self._own[0], 0)
        world.Scatter(self._labels[ids] if is_first else None, self._own[1], 0)
        loss = network.find_gradient(*self._own, 1 / len(ids))
        world.Reduce(network.gradient, self._sum, MPI.SUM, 0)
        loss = world.reduce(loss, MPI.SUM, 0) or 0.0
        if self._sum is not None:
            network.gradient[:] = self._sum
            network.descend(self._task.rate)
        return loss / len(ids)


def _take_part() -> None:
    """A process other than the first: it trains, and says nothing."""
    task = read_task(sys.argv[1])
    contestant = MpiContestant(task)
    contestant.warm_up()
    contestant.train(task.array("order"))


if __name__ == "__main__":
    if MPI.COMM_WORLD.Get_rank():
        _take_part()
    else:
        race(MpiContestant, times_inference=False)  # by one process, it is that of the sequential program
