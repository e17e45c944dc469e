"""Executes a compiled model in training: forward pass, loss and backward pass of all lanes by torch.compile.

A gradient starts here: backward → lane tree. The layers of `compiled_layer` take several lanes in one call
and give the sum of their gradients. Each block is compiled by itself, so a stage of a pipeline, which has
some of them, computes what one worker does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.errors import ModelError
from lockstep.kernels.stock.lane_function import Conv
from lockstep.kernels.triton.conv.tile_table import Table
from lockstep.kernels.triton.lane_tree_sum import lane_tree_sum
from lockstep.kernels.triton.softmax_loss import cross_entropy, lane_means
from lockstep.lower.compiled.compiled_block import Chain, Heads, ModelBlock, make_forward
from lockstep.lower.compiled.compiled_layer import (
    LaneConv2d,
    LaneDropout,
    LaneLinear,
    LaneNorm,
    Sizes,
    by_lane,
)
from lockstep.lower.compiled.lane_graph import trace_lanes
from lockstep.lower.flat_table import DeviceNetwork, Slot
from lockstep.lower.layer_split import LaneWorkers
from lockstep.models.tensors import copy_part
from lockstep.spec import Train

# Bits must depend neither on which operations the compiler fuses nor on a timing.
_OPTIONS: dict[str, Any] = {"deterministic": True, "emulate_precision_casts": True}
_COMPILATIONS = 1024  # of one function: for each block and number of lanes that a worker runs at once


@dataclass(frozen=True)
class CompiledModel:
    """A module that computes every sample by itself, an image's C, H, W, and how its convolutions run.

    `blocks` are those to compute, of a stage of a pipeline only its own. Probes run it with `compiles=False`:
    torch's compiler takes minutes for each number of lanes.
    """

    module: nn.Module
    image: tuple[int, int, int]
    classes: int
    convs: Mapping[str, Conv]
    blocks: tuple[ModelBlock, ...]
    is_first: bool = True
    is_last: bool = True
    compiles: bool = True

    def forwards(
        self, module: nn.Module, prepare: Callable[[Chain], nn.Module]
    ) -> list[Callable[[Tensor], Heads]]:
        """The functions that compute the blocks, with the layers of a copy of the module, each prepared."""
        ends = [self.is_last and block is self.blocks[-1] for block in self.blocks]
        return [
            make_forward(module, block, end, prepare) for block, end in zip(self.blocks, ends, strict=True)
        ]

    def has(self, name: str) -> bool:
        """Whether a parameter or buffer is in its blocks."""
        return any(block.has(name) for block in self.blocks)


class CompiledNetwork(DeviceNetwork):
    """Runs `lanes` lanes of `lane_size` samples through a module; the weights are parts of one flat table."""

    pad = (0, 0)

    def __init__(
        self, model: CompiledModel, lanes: int, train: Train, device: torch.device, _: Table
    ) -> None:
        module, (channels, height, width) = copy_part(model.module, model.has).train(), model.image
        own = [p for name, p in module.named_parameters() if model.has(name)]
        self._buffers = [b for name, b in module.named_buffers() if model.has(name) and b.is_floating_point()]
        _share_frozen(model.module, module)
        slots = [Slot(p.numel()) for p in own if p.requires_grad]
        slots += [Slot(buffer.numel(), is_statistic=True) for buffer in self._buffers]
        super().__init__(slots, model.classes, lanes, train, device)
        self.x = [self.zeros(lanes * self.lane_size, height, width, channels)]
        self._aux_weight = float(getattr(module, "aux_weight", 0.0))
        sizes = Sizes(self.lane_size, train.lanes, lanes, self.dtype)
        self._model, self._module = model, by_lane(module, sizes, model.convs, device)
        self._graphs: list[nn.Module] = []

        def trace(chain: Chain) -> nn.Module:
            self._graphs.append(trace_lanes(chain, sizes))
            return self._graphs[-1]

        forwards = model.forwards(self._module, trace)
        self._params = [p for p in own if p.requires_grad]
        self._bind()
        drops = [drop for drop in self._module.modules() if isinstance(drop, LaneDropout)]
        self._drop_keys = [drop.keys for drop in drops]
        self.keys = self.zeros(len(drops), lanes, dtype=torch.int64)
        self._compiles, self._recomputes = model.compiles and device.type == "cuda", train.recompute
        self._blocks = [self._compile(forward) for forward in forwards]
        self._scores = [self.zeros(lanes, dtype=torch.float32) for _ in range(2)]

    def new_weights(self) -> tuple[Tensor, Tensor]:
        """One table is both."""
        weights, _ = super().new_weights()
        return weights, weights

    def share_with(self, workers: LaneWorkers | None) -> None:
        places = workers.places if workers else {}
        for name, layer in self._module.named_modules():
            if isinstance(layer, LaneConv2d | LaneLinear):
                layer.place = places.get(name, 0)

    def compute(self) -> None:
        """Does nothing: `sum_lanes` computes the lanes and sums them."""

    def sum_lanes(self, lanes: range, out: Tensor, bad: Tensor) -> None:
        rows = slice(lanes.start * self.lane_size, lanes.stop * self.lane_size)
        with self._by_compiler():
            heads = self._run([self.x[0][rows].permute(0, 3, 1, 2)], lanes)
            scores = self._score(heads, rows, lanes, out)
            self._find_grads(heads, scores, out)

    def _run(self, given: Sequence[Tensor], lanes: range) -> Heads:
        """The forward pass of all blocks; logits of other heads than the last block's pass by."""
        for keys, own in zip(self.keys, self._drop_keys, strict=True):
            own[: len(lanes)].copy_(keys[lanes.start : lanes.stop])
        self._running = len(lanes)
        x, *others = given
        for block in self._blocks:
            run = partial(checkpoint, block, use_reentrant=False, preserve_rng_state=False)
            x, *more = run(x) if self._recomputes and block is not self._blocks[-1] else block(x)
            others += more
        return (x, *others)

    def _find_grads(
        self, outputs: Sequence[Tensor], given: Sequence[Tensor], out: Tensor, inputs: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """Write gradients and new statistics to a flat table; returns the gradients of `inputs`."""
        wanted, count = [*self._params, *inputs], len(self._params)
        pairs = [pair for pair in zip(outputs, given, strict=True) if pair[0].requires_grad]
        if pairs and wanted:
            ends, firsts = zip(*pairs, strict=True)
            found = torch.autograd.grad(ends, wanted, firsts, allow_unused=True, materialize_grads=True)
        else:  # all of it is frozen
            found = tuple(torch.zeros_like(tensor) for tensor in wanted)
        if self._params:  # as rows: only those of equal strides are all copied in one launch
            rows = [out[place] for place in self.layout.places[:count]]
            torch._foreach_copy_(rows, [as_row(grad) for grad in found[:count]])
            self.unscale(out)
        if self._buffers:
            torch._foreach_copy_(self._views(out, self._buffers, count), self._new_values())
        return list(found[count:])

    @contextmanager
    def _by_compiler(self) -> Iterator[None]:
        """Compute with gradients, and say what torch's compiler cannot do."""
        try:
            with torch.enable_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's compiler warns of its own code
                yield
        except Exception as error:
            from torch._dynamo.exc import TorchDynamoException

            if not isinstance(error, TorchDynamoException):
                raise
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ModelError(
                f"kernels.set=compiled: torch cannot compile the model: {reason}: use kernels.set=stock"
            ) from None

    @torch.no_grad()
    def _score(self, heads: Heads, rows: slice, lanes: range, out: Tensor) -> list[Tensor]:
        """Write the lanes' losses and counts of right answers; return the gradient of every head's logits."""
        loss, right, labels = self.loss[rows], self.right[rows], self.labels[rows]
        mean, hits = (scores[: len(lanes)] for scores in self._scores)
        total, grads = torch.zeros_like(mean), []
        for number in reversed(range(len(heads))):  # the main head comes last, and its right answers stay
            grad, weight = torch.empty_like(heads[number]), self._aux_weight if number else 1.0
            cross_entropy(
                heads[number].detach(), labels, loss, right, grad, self.lane_size, self._smoothing,
                weights=self._class_weights,
            )  # fmt: skip
            lane_means(loss, right, mean, hits)
            total += mean * weight
            grads.append(grad * weight if self.scale is None else grad * (weight * self.scale[0]))
        self.logits[rows].copy_(heads[0].detach())
        for values, place in ((total, self.layout.loss), (hits, self.layout.right)):
            lane_tree_sum(values[:, None], out[place : place + 1])
        return grads[::-1]

    def _bind(self) -> None:
        """Make parameters and running statistics views of the flat table."""
        tensors: list[Any] = [*self._params, *self._buffers]
        for tensor, view in zip(tensors, self._views(self.weights, tensors), strict=True):
            tensor.data = view

    def _new_values(self) -> list[Tensor]:
        """The buffers' new values, summed over lanes: of batch norms those that they found."""
        norms = [part for graph in self._graphs for part in graph.modules() if isinstance(part, LaneNorm)]
        new = {id(norm.running_mean): norm.news[0] for norm in norms}
        new |= {id(norm.running_var): norm.news[1] for norm in norms}
        return [new[id(b)] if id(b) in new else b * self._running for b in self._buffers]

    def _views(self, flat: Tensor, tensors: list[Any], first: int = 0) -> list[Tensor]:
        """Views of a flat table in the shapes of `tensors`, from slot `first` on."""
        views = []
        for place, tensor in zip(self.layout.places[first:], tensors, strict=False):
            views.append(as_lying(flat[place], tensor.shape))
        return views

    def _compile(self, forward: Callable[[Tensor], Heads]) -> Callable[[Tensor], Heads]:
        if not self._compiles:
            return forward
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = (
            _COMPILATIONS
        )
        compiled: Callable[[Tensor], Heads] = torch.compile(
            forward, fullgraph=True, dynamic=False, options=_OPTIONS
        )
        return compiled


def as_lying(flat: Tensor, shape: torch.Size) -> Tensor:
    """View a part of a flat table in a shape; a filter CO CI KH KW is stored as CO KH KW CI."""
    if len(shape) != 4:
        return flat.view(shape)
    return flat.view(shape[0], shape[2], shape[3], shape[1]).permute(0, 3, 1, 2)


def as_row(tensor: Tensor) -> Tensor:
    """A tensor's elements in the order in which a flat table has them."""
    return (tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor).reshape(-1)


def _share_frozen(module: nn.Module, copy: nn.Module) -> None:
    """Let a copy of a module read the module's own frozen parameters, which no step changes."""
    every = dict(module.named_parameters())
    for name, parameter in copy.named_parameters():
        if not parameter.requires_grad and not parameter.is_meta:
            parameter.data = every[name].data
