"""One stage of a pipeline: a part of a model's calls, forward and backward, lane by lane.

Where a tensor has several consumers, their gradients add in the order of the uncut model: from the last to
the first. Those of later stages come first, since a stage's backward pass begins with what arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lockstep.parallel.cut import Trial
from lockstep.parallel.model_graph import ModelGraph, Value, Values
from lockstep.parallel.schedule import Position
from lockstep.parallel.shard.gathered_model import GatheredModel, Use


@dataclass
class Passed:
    """What a lane's forward pass through a stage leaves behind for its backward pass."""

    received: list[Tensor]
    sent: list[Tensor]
    result: Any = None  # of the model, at the last stage


class Stage(Position):
    """Some of a model's calls, one after another: stage `number` of those that `cuts` make."""

    def __init__(self, graph: ModelGraph, trial: Trial, cuts: Sequence[int], number: int) -> None:
        ends = [0, *cuts, len(graph.calls)]
        super().__init__(number, len(ends) - 1)
        self._graph, self._plain = graph, trial.plain
        self._places = range(ends[number], ends[number + 1])
        self.received = [] if self.is_first else self._tensors(trial, self._places.start)
        self.sent = [] if self.is_last else self._tensors(trial, self._places.stop)
        self.names = self._owned()  # of the parameters and buffers that it keeps
        self.gathered: GatheredModel | None = None  # if its parameters are gathered block by block
        self.uses = {name for place in self._places for name in graph.tensors_of(place)}

    def forward(self, given: Sequence[Tensor]) -> Passed:
        """Compute a lane: `given` is its images at the first stage, else what the stage before sent."""
        values: Values = dict(self._plain)
        if self.is_first:
            values[self._graph.input] = given[0]
        for value, tensor in zip(self.received, () if self.is_first else given, strict=True):
            values[value.key] = tensor.requires_grad_(value.needs_grad)
        gathered = self.gathered
        if gathered is None:
            return self._pass(given, values)
        with gathered.forward_pass():
            return self._pass(given, values, lambda place: gathered.use(self._blocks(place)))

    @property
    def calls(self) -> list[list[str]]:
        """The parameters and buffers that each call uses."""
        return [self._graph.tensors_of(place) for place in self._places]

    @property
    def block_uses(self) -> list[Use]:
        """The blocks of parameters that a forward pass uses, one call after another."""
        if self.gathered is None:
            return []
        sent = self.gathered.blocks_of(value.key for value in self.sent)
        return [use for use in [*map(self._blocks, self._places), sent] if use]

    def _blocks(self, place: int) -> Use:
        return self.gathered.blocks_of(self._graph.tensors_of(place)) if self.gathered else ()

    def _pass(
        self, given: Sequence[Tensor], values: Values, before: Callable[[int], None] = lambda place: None
    ) -> Passed:
        self._graph.run(self._places, values, before)
        if self.gathered:  # parameters that later stages use too
            self.gathered.use(self.gathered.blocks_of(value.key for value in self.sent))
        passed = Passed(list(() if self.is_first else given), [self._find(v, values) for v in self.sent])
        if self.is_last:
            passed.result = self._graph.result(values)
        return passed

    def _find(self, value: Value, values: Values) -> Tensor:
        """A value that is sent; a parameter that a later stage uses too is this model's own."""
        found: Tensor
        found = values[value.key] if value.key in values else self._graph.model.get_parameter(value.key)
        return found

    def _tensors(self, trial: Trial, place: int) -> list[Value]:
        return [trial.tensors[key] for key in self._graph.crossing(place) if key in trial.tensors]

    def _owned(self) -> set[str]:
        """Names of the tensors that it is the first to use; the first stage has those that nobody uses."""
        users: dict[str, int] = {}
        for place in range(len(self._graph.calls)):
            for name in self._graph.tensors_of(place):
                users.setdefault(name, place)
        mine = {name for name, place in users.items() if place in self._places}
        return mine | (self._graph.names - users.keys() if self.is_first else set())
