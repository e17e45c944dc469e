"""A model as a list of calls in the order of its forward pass, which can be cut between two of them.

What one part computes and a later one uses goes along; also a parameter that both use.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from lockstep.lower.model_tracer import ModelTracer
from lockstep.parallel.tensor_form import Form

Key = str  # of a value: the name of a call in the graph, or of a parameter
Values = dict[Key, Any]
_ASSERTS = ("_assert", "_assert_is_none")  # fx puts them after arguments that keep their defaults


@dataclass(frozen=True)
class Value:
    """A tensor that goes from one part to a later one."""

    key: Key
    form: Form
    needs_grad: bool


class ModelGraph:
    """The calls of a model in its present mode, and what each of them uses."""

    def __init__(self, model: nn.Module) -> None:
        graph = ModelTracer().find_calls(model)
        given = [node for node in graph.nodes if node.op == "placeholder"]
        self.model, self.input = model, given[0].name
        self._fixed = {node.name: node.args[0] for node in given[1:] if node.args}
        self.calls = [node for node in graph.nodes if _is_call(node)]
        self._result = next(node.args[0] for node in graph.nodes if node.op == "output")
        names = {id(tensor): name for name, tensor in _tensors(model)}
        self.names = set(names.values())
        # names are kept, and not tensors, as a worker drops those of other stages
        self._tensors = [self._find_tensors(node, names) for node in self.calls]
        self._attributes = {
            node.name: self._find_name(node, names) for node in graph.nodes if node.op == "get_attr"
        }
        self.shared = _find_shared([list(found.values()) for found in self._tensors])
        self.last_uses = self._find_last_uses()

    def label(self, place: int) -> str:
        """What a call is, for people: a module's name, or a function's."""
        target = self.calls[place].target
        return target if isinstance(target, str) else getattr(target, "__name__", str(target))

    def tensors_of(self, place: int) -> list[str]:
        """Names of the parameters and buffers that a call uses."""
        return list(dict.fromkeys(self._tensors[place].values()))

    def run(
        self, places: Iterable[int], values: Values, before: Callable[[int], None] = lambda place: None
    ) -> None:
        """Compute some calls; adds what they give to `values`, and drops what no later call uses."""
        for place in places:
            before(place)
            node = self.calls[place]
            values[node.name] = self.call(place, values)
            for key in [key for key in values if self.last_uses.get(key, -1) <= place]:
                del values[key]

    def result(self, values: Values) -> Any:
        """What the model returns, once all calls are computed."""
        return fx.node.map_arg(self._result, lambda node: self._value(node, values))

    def crossing(self, place: int) -> list[Key]:
        """Keys of what calls before `place` give, or share, and calls from there on use, in a fixed order."""
        early = [self.input, *(node.name for node in self.calls[:place])]
        keys = [key for key in early if self.last_uses.get(key, -1) >= place]
        return keys + [name for name, (first, last) in self.shared.items() if first < place <= last]

    def call(self, place: int, values: Values) -> Any:
        """What one call gives; parameters that are in `values` take the place of the model's own."""
        node = self.calls[place]
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: self._value(n, values))
        if node.op == "call_function":
            return node.target(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        module = self.model.get_submodule(str(node.target))
        arrived = {own: values[name] for own, name in self._tensors[place].items() if name in values}
        return (
            torch.func.functional_call(module, arrived, args, kwargs) if arrived else module(*args, **kwargs)
        )

    def _value(self, node: fx.Node, values: Values) -> Any:
        if node.op == "get_attr":
            name = self._attributes[node.name]
            return values[name] if name in values else operator.attrgetter(name)(self.model)
        return self._fixed[node.name] if node.name in self._fixed else values[node.name]

    def _find_tensors(self, node: fx.Node, names: dict[int, str]) -> dict[str, str]:
        """Parameters and buffers that a call uses: name in the call's own module → name in the model."""
        found = {n.name: self._find_name(n, names) for n in node.all_input_nodes if n.op == "get_attr"}
        found = {own: name for own, name in found.items() if name in names.values()}
        if node.op == "call_module":
            found |= {own: names[id(t)] for own, t in _tensors(self.model.get_submodule(str(node.target)))}
        return found

    def _find_name(self, node: fx.Node, names: dict[int, str]) -> str:
        """The model's own name for an attribute, which may have several."""
        target = str(node.target)
        return names.get(id(operator.attrgetter(target)(self.model)), target)

    def _find_last_uses(self) -> dict[Key, int]:
        """The place of the last call that uses each value; the model's result is used after all calls."""
        found: dict[Key, int] = {}
        for place, node in enumerate(self.calls):
            found[node.name] = place
            found |= {used.name: place for used in node.all_input_nodes}
        fx.node.map_arg(self._result, lambda node: found.update({node.name: len(self.calls)}))
        return found | {name: last for name, (_, last) in self.shared.items()}


def _find_shared(used: Sequence[Sequence[str]]) -> dict[str, tuple[int, int]]:
    """The first and the last place that uses each parameter or buffer that several calls use."""
    found: dict[str, tuple[int, int]] = {}
    for place, names in enumerate(used):
        found |= {name: (found.get(name, (place,))[0], place) for name in names}
    return {name: places for name, places in found.items() if places[0] < places[1]}


def _is_call(node: fx.Node) -> bool:
    return node.op.startswith("call_") and getattr(node.target, "__name__", "") not in _ASSERTS


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
