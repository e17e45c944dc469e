"""Sequential C++: one core, one thread, no library."""

from __future__ import annotations

from pathlib import Path

from lockstep.lab.baselines.baseline_task import Array, BaselineTask
from lockstep.lab.baselines.contest import race
from lockstep.lab.baselines.cpp_network import CppNetwork, build_network


class CppContestant:
    """Gradient, descent, and again."""

    precision = "fp32"

    def __init__(self, task: BaselineTask) -> None:
        library = build_network(Path(task.folder, "network.so"))
        self._network, self._rate = CppNetwork(library, task.channels_last_weights()), task.rate
        self._images, self._labels = task.array("images"), task.array("labels")
        self.predict = self._network.predict

    def warm_up(self) -> None:
        """It was compiled before."""

    def train(self, order: Array) -> list[float]:
        return [self._step(ids) for epoch in order for ids in epoch]

    def _step(self, ids: Array) -> float:
        loss = self._network.find_gradient(self._images[ids], self._labels[ids], 1 / len(ids))
        self._network.descend(self._rate)
        return loss / len(ids)


if __name__ == "__main__":
    race(CppContestant)
