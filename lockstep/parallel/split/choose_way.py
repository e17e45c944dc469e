"""Chooses the way of each call from its kind and shapes; the rules themselves are in `rules.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Size, Tensor, nn

from lockstep.parallel.model_graph import Values
from lockstep.parallel.split import rules
from lockstep.parallel.split.convert import to_part, to_whole
from lockstep.parallel.split.lane_gradients import GradientPart
from lockstep.parallel.split.split_conv import ConvCut
from lockstep.parallel.split.split_linear import LinearCut
from lockstep.parallel.split.split_mean import banded_mean
from lockstep.parallel.split.split_norm import NormCut
from lockstep.parallel.split.split_pool import PoolCut, PoolForm
from lockstep.parallel.split.spread import Spread
from lockstep.parallel.split.way import Way

if TYPE_CHECKING:
    from lockstep.parallel.split.split_graph import SplitGraph

_PARTS = ("forward", "input", "weight")


class WayChooser:
    """Goes through the calls of a graph in order; the spreads of what came before are known."""

    def __init__(self, graph: SplitGraph) -> None:
        self._graph, self._axes = graph, graph.axes

    def choose(self, place: int) -> Way:
        """The way of a call."""
        graph, node, module = self._graph, self._graph.calls[place], self._graph.module(place)
        given = [graph.spreads[n.name] for n in graph.inputs(place)]
        shapes = [graph.shapes[n.name] for n in graph.inputs(place)]
        made = graph.shapes.get(node.name)
        if not given or made is None:
            return self.whole(place)
        makers: list[Callable[[], Way | None]] = [
            lambda: self._convolution(place, module, given[0], shapes[0], made),
            lambda: self._linear(place, module, given[0], shapes[0], made),
            lambda: self._norm(place, module, given[0], shapes[0]),
            lambda: self._pool(place, module, given[0], made),
            lambda: self._mean(place, module, given[0], shapes[0]),
            lambda: self._flatten(place, module, given[0], shapes[0]),
            lambda: self._concatenation(place, given, shapes),
            lambda: self._pointwise(place, module, given, shapes, made),
        ]
        return next((way for make in makers if (way := make())), None) or self.whole(place)

    def whole(self, place: int, rule: str = "whole: computed by every worker") -> Way:
        graph = self._graph
        nodes = [n.name for n in graph.inputs(place)]

        def run(values: Values) -> Any:
            near = {key: graph.to_whole(key, values[key]) for key in nodes}
            return graph.call_whole(place, {**values, **near})

        if all(graph.spreads[key].is_whole for key in nodes):
            return Way(rule, lambda values: graph.call_whole(place, values))
        return Way(rule, run)

    def _convolution(
        self, place: int, module: nn.Module | None, given: Spread, shape: Size, made: Size
    ) -> Way | None:
        form = rules.form_of_convolution(module)
        if form is None or len(shape) != 4:
            return None
        graph, axes = self._graph, self._axes
        banded = rules.is_banded(made, axes.bands)
        cuttable = not (form.transposed and form.groups > 1)
        channels = axes.channels_of_all(made[1]) if cuttable else ()
        per_output = shape[1] // form.groups * form.kernel[0] * form.kernel[1]
        pixels = shape if form.transposed else made
        work = float(
            pixels[0]
            * pixels[2]
            * pixels[3]
            * per_output
            * (made[1] if not form.transposed else made[1] // form.groups)
        )
        if form.transposed:
            work = float(shape.numel() * (made[1] // form.groups) * form.kernel[0] * form.kernel[1])
        parts = _PARTS if graph.inputs(place)[0].name != graph.input else ("forward", "weight")
        if not banded and not channels:
            way = self.whole(place, "whole: too few rows" if axes.bands > 1 else "whole")
            way.work = dict.fromkeys(parts, work)
            return way
        rows = Spread(rows=shape[2] if banded else 0)
        near = Spread(rows.rows, given.channels)  # where the convolution takes its input from
        cut = ConvCut(
            axes,
            form,
            near,
            Spread(made[2] if banded else 0, channels),
            shape[2],
            made[2],
            shape[1],
            made[1],
        )
        (key,) = [n.name for n in graph.inputs(place)]

        def run(values: Values) -> Tensor:
            weight, bias = (graph.parameter(place, name, values) for name in ("weight", "bias"))
            assert weight is not None
            x = self._rows(values[key], given, near)
            x, weight, bias = _in_half(x, weight, bias)
            return cut(x, weight, bias)

        part = self._gradients(place, GradientPart(banded, int(form.transposed), channels))
        rule = " × ".join(
            ["output channels"] * bool(channels) + [f"rows, halo of {form.window.reach - 1}"] * banded
        )
        if not channels:
            cut.by_channel.clear()
        return Way(
            rule, run, cut.made, dict.fromkeys(parts, work), cut.by_channel, cut.by_band, cut, gradients=part
        )

    def _rows(self, x: Tensor, given: Spread, wanted: Spread) -> Tensor:
        """A value with its rows in bands, or not, as a call takes it."""
        if given.rows and not wanted.rows:
            return to_whole(x, self._axes, Spread(given.rows))
        return to_part(x, self._axes, Spread(wanted.rows)) if wanted.rows and not given.rows else x

    def _linear(
        self, place: int, module: nn.Module | None, given: Spread, shape: Size, made: Size
    ) -> Way | None:
        graph, axes = self._graph, self._axes
        if type(module) is not nn.Linear or len(shape) != 2:
            return None
        channels = LinearCut.spread(axes, made[1])
        cut = LinearCut(axes, given, Spread(channels=channels), shape[1], made[1])
        work = dict.fromkeys(_PARTS, float(shape.numel() * made[1]))
        if not channels and not cut.is_sliced:
            way = self.whole(place)
            way.work = work
            return way
        (key,) = [n.name for n in graph.inputs(place)]

        def run(values: Values) -> Tensor:
            weight, bias = (graph.parameter(place, name, values) for name in ("weight", "bias"))
            assert weight is not None
            return cut(*_in_half(values[key], weight, bias))  # type: ignore[arg-type]

        part = self._gradients(place, GradientPart(channels=channels))
        if not channels:
            cut.by_channel.clear()
            cut.by_channel |= {"forward", "weight"}
        return Way("outputs" if channels else "whole", run, cut.made, work, cut.by_channel, gradients=part)

    def _norm(self, place: int, module: nn.Module | None, given: Spread, shape: Size) -> Way | None:
        if type(module) is not nn.BatchNorm2d or given.is_whole:
            return None
        if module.momentum is None or not module.track_running_stats or not module.training:
            return None
        graph, axes = self._graph, self._axes
        (key,) = [n.name for n in graph.inputs(place)]
        if any(len(own) > 1 for own in given.channels):
            return None
        cut = NormCut(axes, given, module.eps, module.momentum)
        names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")

        def run(values: Values) -> Tensor:
            weight, bias, *running, count = (graph.parameter(place, name, values) for name in names)
            assert count is not None
            count.add_(1)
            return cut(values[key], weight, bias, [tensor for tensor in running if tensor is not None])

        part = self._gradients(place, GradientPart(channels=given.channels)) if given.channels else {}
        return Way("statistics by bands" if given.rows else "own channels", run, given, gradients=part)

    def _gradients(self, place: int, part: GradientPart) -> dict[str, GradientPart]:
        """The same for weight and bias, if the layer has them."""
        graph = self._graph
        found = [name for name in ("weight", "bias") if graph.parameter(place, name, {}) is not None]
        return {
            graph.own_name(place, name): replace(part, dim=part.dim if name == "weight" else 0)
            for name in found
        }

    def _pool(self, place: int, module: nn.Module | None, given: Spread, made: Size) -> Way | None:
        if type(module) not in (nn.MaxPool2d, nn.AvgPool2d) or given.is_whole:
            return None
        graph, axes = self._graph, self._axes
        (key,) = [n.name for n in graph.inputs(place)]
        if not given.rows:
            return Way("own channels", lambda values: graph.call_whole(place, values), given)
        form = PoolForm.of(module)  # type: ignore[arg-type]
        if form and rules.is_banded(made, axes.bands):
            cut = PoolCut(axes, form, given, Spread(made[2], given.channels), made[3])
            return Way(f"rows, halo of {form.window.reach - 1}", lambda values: cut(values[key]), cut.made)
        near = Spread(channels=given.channels)

        def run(values: Values) -> Any:
            return graph.call_whole(place, {**values, key: self._rows(values[key], given, near)})

        return Way("own channels, all rows" if near.channels else "whole: too few rows", run, near)

    def _mean(self, place: int, module: nn.Module | None, given: Spread, shape: Size) -> Way | None:
        graph, axes = self._graph, self._axes
        keeps = rules.mean_dims(graph.calls[place], module)
        if keeps is None or given.is_whole or len(shape) != 4:
            return None
        (key,), made = [n.name for n in graph.inputs(place)], Spread(channels=given.channels)
        if given.rows:
            return Way("sums by bands", lambda v: banded_mean(v[key], axes, given.rows, bool(keeps)), made)
        return Way("own channels", lambda values: graph.call_whole(place, values), made)

    def _flatten(self, place: int, module: nn.Module | None, given: Spread, shape: Size) -> Way | None:
        graph = self._graph
        if not rules.is_flatten(graph.calls[place], module) or given.is_whole or len(shape) < 2:
            return None
        (key,), size = [n.name for n in graph.inputs(place)], shape[2:].numel()
        near = Spread(channels=given.channels)

        def run(values: Values) -> Tensor:
            return self._rows(values[key], given, near).flatten(1)

        scaled = tuple(tuple(_scaled(own, size) for own in ranges) for ranges in given.channels)
        return Way("rows gathered" if given.rows else "own channels", run, Spread(channels=scaled))

    def _concatenation(self, place: int, given: Sequence[Spread], shapes: Sequence[Size]) -> Way | None:
        graph = self._graph
        if not rules.is_concatenation(graph.calls[place]) or all(s.is_whole for s in given):
            return None
        same_rows = len({s.rows for s in given}) == 1
        cut = [bool(s.channels) for s in given]
        repeated = len(graph.inputs(place)) != len(graph.calls[place].args[0])  # type: ignore[arg-type]
        if not same_rows or len(set(cut)) > 1 or repeated:
            return None
        size, channels = self._axes.channel.size, []
        for worker in range(size) if cut[0] else ():
            found: list[range] = []
            first = 0
            for spread, shape in zip(given, shapes, strict=True):
                found += [range(first + own.start, first + own.stop) for own in spread.channels[worker]]
                first += shape[1]
            channels.append(tuple(found))
        made = Spread(given[0].rows, tuple(channels))
        return Way("own parts", lambda values: graph.call_whole(place, values), made)

    def _pointwise(
        self,
        place: int,
        module: nn.Module | None,
        given: Sequence[Spread],
        shapes: Sequence[Size],
        made: Size,
    ) -> Way | None:
        graph, axes = self._graph, self._axes
        if all(s.is_whole for s in given):
            return None
        alike = len(set(given)) == 1 and len({*shapes, made}) == 1
        if alike and rules.is_exact(graph.calls[place], module):
            return Way("own part", lambda values: graph.call_whole(place, values), given[0], exact=True)
        sizes = (
            [made.numel() * len(r[0]) // made[2] for r in axes.rows_of_all(made[2])] if given[0].rows else []
        )
        if not alike or not all(map(rules.keeps_vectors, [*sizes, made.numel()])):
            return None
        if rules.is_smooth(module) and not given[0].channels:
            return Way("own part", lambda values: graph.call_whole(place, values), given[0], exact=True)
        if rules.is_lrn(module):
            (key,), across = [n.name for n in graph.inputs(place)], Spread(channels=given[0].channels)

            def run(values: Values) -> Tensor:
                every = to_whole(values[key], axes, across)
                return to_part(graph.call_whole(place, {**values, key: every}), axes, across)

            return Way("own rows, all channels" if across.channels else "own rows", run, given[0])
        return None


def _scaled(own: range, size: int) -> range:
    return range(own.start * size, own.stop * size)


def _in_half(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """What autocast would hand to a kernel."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, weight, bias
    half = torch.get_autocast_dtype(kind)
    return x.to(half), weight.to(half), None if bias is None else bias.to(half)
