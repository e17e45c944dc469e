"""Asks kernels, without a plan, whether every cut that a plan can make gives the bits of the whole.

Where not, the layer is computed in cells of the run's grid, each at its own fixed shape, by one worker, too:
band by band, or by slices of channels. Which layers are is part of the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.parallel.split.call_site import CallSite
from lockstep.parallel.split.layers.split_conv import ConvCut
from lockstep.parallel.split.layers.split_linear import LinearCut
from lockstep.parallel.split.layers.whole_sums import whole_sums
from lockstep.parallel.split.probes.probe_values import cancel, probe_values
from lockstep.parallel.split.split_graph import SplitGraph
from lockstep.parallel.split.way import FORWARD, INPUT, WEIGHT, Way

Cells = tuple[set[str], set[str]]  # parts of a layer's work: by bands, and by slices


@dataclass
class _Trial:
    """A part of a layer's work: how some rows and channels of its result are computed."""

    part: str
    compute: Callable[[range, range], Tensor]
    rows: int
    channels: int
    dim: int = 1  # of the channels

    def keeps_rows(self, parts: Sequence[range], channels: range) -> bool:
        """Whether rows of some channels have the same bits when they are computed by themselves."""
        whole = self.compute(range(self.rows), channels)
        return all(
            torch.equal(self.compute(part, channels), whole.narrow(2, part.start, len(part)))
            for part in parts
        )

    def keeps_channels(self, rows: range, parts: Sequence[range]) -> bool:
        """Whether channels of some rows have the same bits when they are computed by themselves."""
        whole = self.compute(rows, range(self.channels)) if parts else None
        return whole is None or all(
            torch.equal(self.compute(rows, part), whole.narrow(self.dim, part.start, len(part)))
            for part in parts
        )


class CellProbe:
    """Finds, without a plan, what is computed band by band or by slices."""

    def __init__(self, half: torch.dtype | None, device: torch.device) -> None:
        self._dtype, self._device = half or torch.float32, device
        self._known: dict[Hashable, Cells] = {}

    def check(self, graph: SplitGraph, place: int, way: Way) -> Way:
        """The same way, with what is computed in cells."""
        cut = way.cut
        if not isinstance(cut, ConvCut | LinearCut):
            return way
        shape, weight = graph.shapes[graph.inputs(place)[0].name], graph.parameter(place, "weight", {})
        assert weight is not None
        has_bias = graph.parameter(place, "bias", {}) is not None
        key = cut.form if isinstance(cut, ConvCut) else None, shape, weight.shape, has_bias
        if key not in self._known:
            self._known[key] = self._find(cut, shape, weight, has_bias)
        by_band, by_slice = self._known[key]
        way.by_band |= by_band
        way.by_slice |= by_slice
        is_stock = isinstance(cut, ConvCut) and not cut.is_banded and not way.by_slice
        if is_stock and graph.axes.is_one_worker:
            return CallSite(graph, place).whole(way.rule, dict(way.work))
        return way

    @torch.no_grad()
    def _find(self, cut: ConvCut | LinearCut, shape: torch.Size, weight: Tensor, has_bias: bool) -> Cells:
        if isinstance(cut, ConvCut):
            trials, is_banded = self._conv(cut, shape, weight, has_bias), cut.is_banded
        else:
            trials, is_banded = self._linear(cut, shape, weight), False
        by_band, by_slice = set(), set()
        for trial in trials:
            is_tried = is_banded and trial.part != WEIGHT  # a weight's gradient is a sum for each band anyhow
            parts = cut.axes.dealt_rows(trial.rows) if is_tried else []
            is_whole = not is_banded or (is_tried and trial.keeps_rows(parts, range(trial.channels)))
            bands = [range(trial.rows)] if is_whole else cut.axes.own_bands(trial.rows)
            dealt = cut.axes.dealt_channels(trial.channels) if cut.is_sliced else []
            if not all(trial.keeps_channels(rows, dealt) for rows in bands):
                by_slice.add(trial.part)
                slices = cut.axes.slices_of(trial.channels)
                is_whole = is_whole and (not parts or all(trial.keeps_rows(parts, one) for one in slices))
            if is_tried and not is_whole:
                by_band.add(trial.part)
        return by_band, by_slice

    def _conv(self, cut: ConvCut, shape: torch.Size, weight: Tensor, has_bias: bool) -> Iterator[_Trial]:
        form, rows, out_rows = cut.form, range(cut.rows), range(cut.out_rows)

        def drawn(part: str) -> tuple[Tensor, Tensor, Tensor]:
            made = len(x), cut.outs, cut.out_rows, y.shape[3]
            dy = self._values("dy", x.new_empty(made))
            found = self._values("x", x), self._values("weight", weight), dy
            cancel(part, *found, form.transposed)
            return found

        x = torch.empty(shape, device=self._device)
        y = form.forward(x.to(self._dtype), rows, self._values("weight", weight), None, out_rows, range(1))
        x1, w1, _ = drawn(FORWARD)
        yield _Trial(
            FORWARD,
            lambda out, outs: form.forward(x1, rows, w1, None, out, outs),
            cut.out_rows,
            cut.outs,
        )
        _, w2, dy2 = drawn(INPUT)
        yield _Trial(
            INPUT,
            lambda own, ins: form.input_gradient(dy2, out_rows, w2, own, (ins,), shape[3]),
            cut.rows,
            cut.ins,
        )
        x3, _, dy3 = drawn(WEIGHT)

        def by_weight(band: range, outs: range) -> Tensor:
            dy = dy3[:, outs.start : outs.stop]
            if has_bias and not cut.is_banded:
                return whole_sums(form, x3, dy, outs, weight.shape, True)[0]
            return form.weight_gradient(x3, rows, dy, out_rows, band, outs, weight.shape)

        windows = cut.rows if form.transposed else cut.out_rows
        yield _Trial(WEIGHT, by_weight, windows, cut.outs, int(form.transposed))

    def _linear(self, cut: LinearCut, shape: torch.Size, weight: Tensor) -> Iterator[_Trial]:
        def drawn(part: str) -> tuple[Tensor, Tensor, Tensor]:
            x, dy = (torch.empty(size, device=self._device) for size in (shape, (shape[0], cut.outs)))
            found = self._values("x", x), self._values("weight", weight), self._values("dy", dy)
            cancel(part, *found, False)
            return found

        x1, w1, _ = drawn(FORWARD)
        yield _Trial(FORWARD, lambda _, outs: cut.outputs(x1, w1, None, outs), 1, cut.outs)
        x2, _, dy2 = drawn(WEIGHT)
        yield _Trial(WEIGHT, lambda _, outs: cut.by_weight(x2, dy2, outs), 1, cut.outs, 0)

    def _values(self, name: str, like: Tensor) -> Tensor:
        return probe_values(name, like.to(self._device)).to(self._dtype)
