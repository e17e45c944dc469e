"""A fully connected layer in one round of lanes: a lane each, computed by all workers along data together.

Forward: everyone gets the inputs of every lane of the round, computes its own outputs of each lane, and gives
them to the lane's worker. Backward the same way: gradients of outputs go to who has them, partial sums of
gradients of inputs to the lane's worker. N samples of a lane.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.tree import LaneTree
from lockstep.kernels.lrn import widen
from lockstep.parallel.mix.lane_round import LaneForm, LaneRound
from lockstep.parallel.mix.row_cut import RowCut
from lockstep.parallel.split.layer_clock import Traffic


class MixedLinear:
    """One layer: this worker's rows of its weight, and the sums of their gradients over lanes."""

    def __init__(
        self,
        name: str,
        module: nn.Linear,
        cut: RowCut,
        rounds: LaneRound,
        wire: torch.dtype | None,
    ) -> None:
        self.name, self.module, self.cut, self._rounds = name, module, cut, rounds
        self._wire = wire if module.weight.dtype == torch.float32 else None
        self.form: LaneForm | None = None  # of a lane's inputs
        self.needs_input = True  # whether something before the layer is trained
        self.rows: Callable[[], Tensor] | None = None  # [own, ins], once the state has begun
        self.traffic = Traffic()
        self._lanes: dict[int, Tensor] = {}  # inputs of each lane of the round, by its worker
        self.begin()

    def __call__(self, x: Tensor) -> Tensor:
        """[N, outs]: what the layer gives for this worker's lane; a collective."""
        kind, bias = x.device.type, self.module.bias
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        given = x.to(dtype), self.module.weight, None if bias is None else bias.to(dtype)
        found: Tensor = _Multiply.apply(*given, self)  # type: ignore[no-untyped-call]
        return found

    def begin(self) -> None:
        """Start a step."""
        self._trees = [LaneTree(lanes.start, self._wire) for lanes in self._rounds.lanes_of_all]

    @property
    def sent_bytes(self) -> int:
        """What this worker sends in a step."""
        lanes, rank = self._rounds.lanes_of_all, self.cut.rank
        count = sum(map(len, lanes)), len(lanes[rank])
        assert self.form
        return self.form.samples * self.cut.sent_bytes(*count, self.needs_input, self.form.dtype)

    @property
    def by_data_bytes(self) -> int:
        """What a worker would send for the weight's gradient if it were whole everywhere."""
        size = (self._wire or self.module.weight.dtype).itemsize
        return 2 * (self.cut.workers - 1) * self.cut.outs * self.cut.ins * size // self.cut.workers

    def mean(self) -> Tensor:
        """Flat, of this worker's rows: the mean of their gradients over all lanes."""
        whole = LaneTree(wire=self._wire)
        for _, height, leaf in (root for tree in self._trees for root in tree.roots()):
            whole.add(leaf, height)
        return whole.mean()[0].reshape(-1)

    def forward(self, x: Tensor | None) -> Tensor | None:
        """The outputs of this worker's lane, if it has one in this round; a collective."""
        rounds, cut = self._rounds, self.cut
        assert self.form
        form = self.form = self.form if x is None else LaneForm(len(x), x.dtype, x.device)
        self._lanes = rounds.exchange(
            self.traffic,
            {} if x is None else dict.fromkeys(range(cut.workers), x),
            {worker: form.shaped(cut.ins) for worker in rounds.holders},
        )
        self._weight, bias = self._own(form)
        made = {worker: cut.forward(lane, self._weight, bias) for worker, lane in self._lanes.items()}
        parts = rounds.exchange(
            self.traffic,
            made,
            {} if x is None else {w: form.shaped(len(own)) for w, own in enumerate(cut.of_all)},
        )
        return None if x is None else torch.cat([parts[worker] for worker in range(cut.workers)], 1)

    def backward(self, dy: Tensor | None, needs_input: bool) -> Tensor | None:
        """The gradient of the inputs of this worker's lane, if it has one and needs it; a collective."""
        rounds, cut, lanes = self._rounds, self.cut, self._lanes
        assert self.form
        form, self._lanes = self.form, {}
        columns = {} if dy is None else {w: dy[:, own.start : own.stop] for w, own in enumerate(cut.of_all)}
        arrived = rounds.exchange(
            self.traffic, columns, {worker: form.shaped(len(cut.own)) for worker in rounds.holders}
        )
        for worker, part in arrived.items():
            self._trees[worker].add([cut.weight_gradient(part, lanes[worker]).to(self.module.weight.dtype)])
        if not needs_input:
            return None
        partials = rounds.exchange(
            self.traffic,
            {worker: cut.partial_sum(part, self._weight) for worker, part in arrived.items()},
            {} if dy is None else {worker: widen(form.shaped(cut.ins)) for worker in range(cut.workers)},
        )
        if dy is None:
            return None
        return cut.add_up([partials[worker] for worker in range(cut.workers)]).to(form.dtype)

    def _own(self, form: LaneForm) -> tuple[Tensor, Tensor | None]:
        """This worker's rows of weight and bias, as kernels take them."""
        assert self.rows
        own, bias = self.cut.own, self.module.bias
        part = None if bias is None else bias.detach()[own.start : own.stop].to(form.dtype)
        return self.rows().to(form.dtype), part


class _Multiply(torch.autograd.Function):
    """The weight is given only so that there is a backward pass; its gradient is the layer's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: MixedLinear) -> Tensor:
        ctx.layer = layer
        layer._rounds.note(lambda: layer.forward(None))
        found = layer.forward(x.contiguous())
        assert found is not None
        return found

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        needs_input, _, needs_bias, _ = ctx.needs_input_grad
        layer: MixedLinear = ctx.layer
        layer._rounds.note(lambda: layer.backward(None, needs_input))
        grad = layer.backward(dy, needs_input)
        return grad, None, dy.sum(0) if needs_bias else None, None
