"""One call of a model with the shapes and spreads of what it takes: what a rule looks at to find its way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Size, Tensor, fx, nn

from lockstep.parallel.model_graph import Key, Values
from lockstep.parallel.split.axes import Axes
from lockstep.parallel.split.convert import to_part, to_whole
from lockstep.parallel.split.lane_gradients import GradientPart
from lockstep.parallel.split.spread import Spread
from lockstep.parallel.split.way import Way


class LayeredGraph(Protocol):
    """What a site needs of the graph of its call."""

    axes: Axes
    input: Key
    calls: list[fx.Node]
    shapes: dict[Key, Size]
    spreads: dict[Key, Spread]
    layers: list[str]  # names of the calls, for people

    def inputs(self, place: int) -> list[fx.Node]: ...
    def module(self, place: int) -> nn.Module | None: ...
    def parameter(self, place: int, name: str, values: Values) -> Tensor | None: ...
    def own_name(self, place: int, name: str) -> str: ...
    def call_whole(self, place: int, values: Values) -> Any: ...


@dataclass
class CallSite:
    """A call whose result is one tensor, of at least one tensor besides parameters."""

    graph: LayeredGraph
    place: int

    def __post_init__(self) -> None:
        self.node: fx.Node = self.graph.calls[self.place]
        self.module: nn.Module | None = self.graph.module(self.place)
        self.axes: Axes = self.graph.axes.of_layer(self.graph.layers[self.place])
        self.keys: list[Key] = [node.name for node in self.graph.inputs(self.place)]
        self.given: list[Spread] = [self.graph.spreads[key] for key in self.keys]
        self.shapes: list[Size] = [self.graph.shapes[key] for key in self.keys]
        self.made: Size | None = self.graph.shapes.get(self.node.name)

    @property
    def is_whole(self) -> bool:
        """Whether every worker has all that the call takes."""
        return all(spread.is_whole for spread in self.given)

    def whole(
        self, rule: str, work: dict[str, float] | None = None, compute: Callable[[Values], Any] | None = None
    ) -> Way:
        """Every worker computes the call from whole values, as the model has it or as one worker would."""
        inner = compute or self.stock

        def run(values: Values) -> Any:
            pairs = zip(self.keys, self.given, strict=True)
            found = {key: to_whole(values[key], self.axes, spread) for key, spread in pairs}
            return inner({**values, **found})

        return Way(rule, inner if self.is_whole else run, work=work or {})

    def stock(self, values: Values) -> Any:
        """The call as the model has it, on what this worker has."""
        return self.graph.call_whole(self.place, values)

    def own(self, rule: str, made: Spread, exact: bool = False) -> Way:
        """Every worker computes the call on its own part alone."""
        return Way(rule, self.stock, made, exact=exact)

    def rows(self, x: Tensor, wanted: Spread) -> Tensor:
        """The first value with its rows in bands, or not, as the call takes it."""
        given = self.given[0]
        if given.rows and not wanted.rows:
            return to_whole(x, self.axes, Spread(given.rows))
        return to_part(x, self.axes, Spread(wanted.rows)) if wanted.rows and not given.rows else x

    def parameters(self, values: Values, *names: str) -> list[Tensor | None]:
        """Parameters and buffers of the call's module."""
        return [self.graph.parameter(self.place, name, values) for name in names]

    def gradients(self, part: GradientPart) -> dict[str, GradientPart]:
        """What a worker has of the gradients of weight and bias, if the layer has them."""
        found = {name: self.graph.parameter(self.place, name, {}) for name in ("weight", "bias")}
        return {
            self.graph.own_name(self.place, name): replace(part, dim=part.dim if name == "weight" else 0)
            for name, tensor in found.items()
            if tensor is not None
        }
