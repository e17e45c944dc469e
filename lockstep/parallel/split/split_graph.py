"""A model's calls over the workers that share a lane: each call has its way, chosen by rules from its shapes.

Every value has one home: its parts lie on workers as its way says. A call takes values from there and gives
gradients there, so where a value has several consumers their gradients add element by element, in autograd's
order, as in the uncut model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Size, Tensor, fx, nn

from lockstep.kernels.numerics import half_precision
from lockstep.parallel.model_graph import Key, ModelGraph, Values
from lockstep.parallel.split.axes import Axes
from lockstep.parallel.split.call_site import CallSite
from lockstep.parallel.split.convert import to_whole
from lockstep.parallel.split.lane_gradients import GradientPart, make_whole
from lockstep.parallel.split.spread import WHOLE, Spread
from lockstep.parallel.split.way import Way
from lockstep.parallel.split.ways import choose_way

OUTPUTS = "outputs"  # in the place of a layer
Check = Callable[["SplitGraph", int, Way], Way]  # the way that a call is computed, of the one by rule


class SplitGraph(ModelGraph):
    """The calls of a model in training mode, each in its own way."""

    def __init__(
        self, model: nn.Module, axes: Axes, images: Tensor, check: Check, half: torch.dtype | None = None
    ) -> None:
        super().__init__(model)
        self.axes, forms = axes, self._find_forms(images, half)
        self.shapes = {key: form.shape for key, form in forms.items()}
        self.dtypes = {key: form.dtype for key, form in forms.items()}
        self.layers = self._name_layers()
        self.spreads: dict[Key, Spread] = {self.input: WHOLE}
        self.ways: list[Way] = []
        for place, node in enumerate(self.calls):
            way = check(self, place, choose_way(CallSite(self, place)))
            self.ways.append(way)
            self.spreads[node.name] = way.made

    def forward(self, images: Tensor) -> Any:
        """What the model returns, whole on every worker."""
        values: Values = {self.input: images}
        self.run(range(len(self.calls)), values)
        return self.result(values)

    def places(self, name: str, pixels: bool, device: torch.device) -> Tensor | None:
        """The places of this worker's part of a dropout layer's output: of its pixels, or of its channels."""
        node = next(n for n in self.calls if n.op == "call_module" and n.target == name)
        spread, shape = self.spreads[node.name], list(self.shapes[node.name])
        shape = shape if pixels else shape[:2]
        spread = spread if pixels else Spread(channels=spread.channels)
        if spread.is_whole:
            return None
        whole = torch.arange(Size(shape).numel(), device=device).view(shape)
        return self.axes.own_part(whole, spread).reshape(-1)

    def call(self, place: int, values: Values) -> Any:
        """What one call gives: this worker's part of it."""
        if self.axes.is_one_worker:
            return self.ways[place].run(values)
        layer, clock = self.layers[place], self.axes.clock
        before = [values[node.name].grad_fn for node in self.inputs(place)]
        with clock.busy(layer):
            found = self.ways[place].run(values)
        if isinstance(found, Tensor) and not any(found.grad_fn is operation for operation in before):
            clock.watch_backward(layer, found)  # a call that gives what it took has no backward pass
        return found

    def call_whole(self, place: int, values: Values) -> Any:
        """The same without a plan, on whole values."""
        return super().call(place, values)

    def result(self, values: Values) -> Any:
        """What the model returns, whole on every worker."""
        axes = self.axes.of_layer(OUTPUTS)
        whole = {
            key: to_whole(value, axes, self.spreads.get(key, WHOLE)) if isinstance(value, Tensor) else value
            for key, value in values.items()
        }
        return super().result(whole)

    def finish(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A lane's gradients, whole on every worker."""
        parts: dict[str, GradientPart] = {}
        for way in self.ways:
            parts |= {name: part for name, part in way.gradients.items() if name in grads}
        return make_whole(self.axes, grads, parts)

    def module(self, place: int) -> nn.Module | None:
        """The layer that a call is, if no other call uses it or its parameters."""
        node = self.calls[place]
        if node.op != "call_module":
            return None
        again = [n for n in self.calls if n.op == "call_module" and n.target == node.target]
        if len(again) > 1 or any(name in self.shared for name in self.tensors_of(place)):
            return None
        return self.model.get_submodule(str(node.target))

    def inputs(self, place: int) -> list[fx.Node]:
        """The tensors that a call uses, besides parameters."""
        nodes = self.calls[place].all_input_nodes
        return [
            n for n in nodes if n.op != "get_attr" and n.name not in self._fixed and n.name in self.shapes
        ]

    def parameter(self, place: int, name: str, values: Values) -> Tensor | None:
        """A parameter or buffer of a call's module."""
        full = self._tensors[place].get(name)
        if full is None:
            return None
        if full in values:
            found: Tensor = values[full]
            return found
        return getattr(self.model.get_submodule(str(self.calls[place].target)), name)  # type: ignore[no-any-return]

    def own_name(self, place: int, name: str) -> str:
        """The model's name for a parameter of a call's module."""
        return self._tensors[place][name]

    def _name_layers(self) -> list[str]:
        """What each call is, for people; calls of the same name are numbered."""
        seen: Counter[str] = Counter()
        found = []
        for label in map(self.label, range(len(self.calls))):
            seen[label] += 1
            found.append(label if seen[label] == 1 else f"{label} ({seen[label]})")
        return found

    def _find_forms(self, images: Tensor, half: torch.dtype | None) -> dict[Key, Tensor]:
        """A stand-in for every value that is one tensor; in full precision nothing is computed for it."""
        with torch.no_grad(), suppress(Exception):  # whatever a module raises on tensors without memory
            if not half:
                return self._try_forms(images.to("meta"), is_meta=True)
        with torch.no_grad(), half_precision(images.device, half):
            return self._try_forms(images, is_meta=False)

    def _try_forms(self, images: Tensor, is_meta: bool) -> dict[Key, Tensor]:
        known = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        values: Values = {self.input: images}
        stand_ins = (
            {name: torch.empty_like(known[name], device="meta") for name in self.names} if is_meta else {}
        )
        forms = {self.input: images.to("meta")}
        for place, node in enumerate(self.calls):
            values[node.name] = found = ModelGraph.call(self, place, {**stand_ins, **values})
            if isinstance(found, Tensor):
                forms[node.name] = found.to("meta")
            for key in [key for key in values if self.last_uses.get(key, -1) <= place]:
                del values[key]
        return forms
