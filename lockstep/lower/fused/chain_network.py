"""Executes a fused chain, in training and eval mode: forward pass, loss and backward pass of all lanes.

A gradient's path begins here: backward → lane tree. In a pipeline a network is a part of the chain. It gets
the output of the layer before and the gradient of its own output from its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lockstep.kernels.cuda_stream import beside
from lockstep.kernels.triton.conv.fused_forward import forward
from lockstep.kernels.triton.conv.fused_gradient import input_grad, weight_grad
from lockstep.kernels.triton.conv.fused_layer import Layer
from lockstep.kernels.triton.conv.tile import ALL_TILES, lane_chunks
from lockstep.kernels.triton.conv.tile_table import OPERATIONS, Table
from lockstep.lower.flat_table import Slot, fill_inside, inside
from lockstep.lower.fused.dealt_network import DealtNetwork, as_images
from lockstep.lower.fused.tile_deal import LaunchSamples
from lockstep.spec import Train


class ChainNetwork(DealtNetwork):
    """Runs `lanes` lanes of `lane_size` samples through a chain; each layer has a weight and a bias.

    Of a part of a chain, `before` is the layer whose output it reads; only the last part `gives_logits`.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        lanes: int,
        train: Train,
        device: torch.device,
        table: Table,
        *,
        before: Layer | None = None,
        gives_logits: bool = True,
    ) -> None:
        self.layers, lane_size = list(layers), train.batch // train.lanes
        self._before, self._gives_logits = before, gives_logits
        self.tiles = [table.tiles(layer, train.precision) for layer in layers]
        slots = []
        for layer, tiles in zip(layers, self.tiles, strict=True):
            chunks = lane_chunks(tiles["weight_grad"].parts, train.lanes, lane_size)
            slots += [Slot(layer.depth * layer.out_channels, chunks), Slot(layer.out_channels, chunks)]
        super().__init__(slots, layers[-1].out_channels, lanes, train, device)
        count = len(self.labels)
        self.x = [self.zeros(count, *layer.in_shape) for layer in layers]
        self._code = [
            self.zeros(count, *layer.out_shape, dtype=torch.uint8) if layer.pool > 1 else None
            for layer in layers
        ]
        self._compact = [i == 0 and before is None and layer.pool > 1 for i, layer in enumerate(layers)]
        shapes = [
            layer.out_shape if compact else layer.grad_shape
            for layer, compact in zip(layers, self._compact, strict=True)
        ]
        self._g = [self.zeros(count, *shape) for shape in shapes]
        self.keys = self.zeros(len(layers), lanes, dtype=torch.int64)
        self._out = self.logits if gives_logits else self.zeros(count, *layers[-1].out_shape)
        self._g_before = None if before is None else self.zeros(count, *_sent_shape(before))

    def forward(self, training: bool = True) -> None:
        """x[0] and the weights' copy → logits, or the output of a part; dropout only in training."""
        for i in range(len(self.layers)):
            self.run("forward", i, training)

    def score(self) -> None:
        self.score_into(self._g[-1])

    def backward(self) -> None:
        if self._gives_logits:
            self.score_into(self._g[-1], self._class_weights)
            self.average_scores()
        with beside(self._device) as launch:
            for i in reversed(range(len(self.layers))):
                launch(partial(self.run, "weight_grad", i))
                if i or self._before:
                    self.run("input_grad", i)

    def leave(self) -> list[Tensor]:
        return [self._out.clone()]

    def enter_back(self, given: Sequence[Tensor]) -> None:
        self._put_grad(len(self.layers) - 1, given[0])

    def _put_grad(self, i: int, grad: Tensor) -> None:
        """Put every value of a layer's gradient at the pixel that pooling took, as `input_grad` does."""
        layer, g, code = self.layers[i], self._g[i], self._code[i]
        if code is None or self._compact[i]:
            fill_inside(g, grad)
            return
        (high, wide), inner = layer.out_size, inside(g, *layer.conv_size)
        for s in range(layer.pool**2):
            spots = inner[:, s // 2 : 2 * high : 2, s % 2 : 2 * wide : 2]
            spots.copy_(torch.where(code == s, grad, 0.0))

    def leave_back(self) -> list[Tensor]:
        assert self._before and self._g_before is not None
        return [inside(self._g_before, *self._before.out_size).clone(memory_format=torch.contiguous_format)]

    def run(self, operation: str, i: int, training: bool = True) -> None:
        """Launch one operation of layer i; with other workers this one's tiles, except in evaluation."""
        weight, bias = self._weight_places(i)
        if operation == "forward":
            self._run_forward(i, self.copy[weight], self.weights[bias], training)
        elif operation == "input_grad":
            self._run_input_grad(i, self.copy[weight])
        else:
            own, parts = self._own(operation, i)[1], (self.part(weight), self.part(bias))
            if not own.is_empty:
                weight_grad(
                    self.layers[i], self._g[i], self._code[i], self.x[i], *parts, self.lanes,
                    self.tiles[i][operation], compact=self._compact[i], precision=self.precision, own=own,
                )  # fmt: skip

    def _run_forward(self, i: int, weight: Tensor, bias: Tensor, training: bool) -> None:
        layer, code, is_last = self.layers[i], self._code[i], i == len(self.layers) - 1
        n, own = self._own("forward", i) if training else (slice(None), ALL_TILES)
        out = self._out if is_last else self.x[i + 1]
        if not own.is_empty:
            forward(
                layer if training else replace(layer, dropout=0.0),
                self.x[i][n], weight, bias, out[n], None if code is None else code[n],
                self.tiles[i]["forward"], out_border=(0, 0) if is_last else self.layers[i + 1].pad,
                keys=self.keys[i][(n.start or 0) // self.lane_size :], lane_size=self.lane_size,
                precision=self.precision, own=own,
            )  # fmt: skip
        if training:
            self._make_whole("forward", i, [as_images(out, layer), *([] if code is None else [code])])

    def _run_input_grad(self, i: int, weight: Tensor) -> None:
        """Compute the gradient of the layer before; with other workers that of its pooled output first."""
        layer, before, (n, own) = self.layers[i], self._layer_before(i), self._own("input_grad", i)
        g, code = (self._g[i - 1], self._code[i - 1]) if i else (self._g_before, None)
        assert g is not None
        compact = self._compact[i - 1] if i else before.pool > 1
        is_spread = before.pool > 1 and not compact and self._is_dealt("input_grad", i)
        out = self.zeros(len(g), *before.out_shape) if is_spread else g
        if not own.is_empty:
            input_grad(
                layer, before, self._g[i][n], weight, self.x[i][n], None if code is None else code[n], out[n],
                self.tiles[i]["input_grad"], compact=compact or is_spread, precision=self.precision, own=own,
            )  # fmt: skip
        if self._is_dealt("input_grad", i):
            self._make_grad_whole(i, inside(out, *before.out_size))
        if is_spread:
            self._put_grad(i - 1, out)

    def _make_grad_whole(self, i: int, inner: Tensor) -> None:
        """Fill in what others computed of the gradient of a layer's input, [N, H, W, C] without a border."""
        layer = self.layers[i]
        seen = inner.reshape(len(inner), layer.height, layer.width, layer.in_channels)  # may be flattened
        self._make_whole("input_grad", i, [seen])
        if seen.data_ptr() != inner.data_ptr():
            inner.copy_(seen.view(inner.shape))

    def _layer_before(self, i: int) -> Layer:
        before = self.layers[i - 1] if i else self._before
        assert before
        return before

    def _products(self) -> list[tuple[str, int]]:
        every = range(len(self.layers))
        return [(name, i) for i in every for name in OPERATIONS if self._is_computed(name, i)]

    def _is_computed(self, operation: str, i: int) -> bool:
        return operation != "input_grad" or i > 0 or self._before is not None

    def _batch(self, operation: str, i: int) -> LaunchSamples:
        """A dropout key is a lane's, so samples with dropout are dealt by whole lanes."""
        by_lane = operation == "forward" and self.layers[i].dropout > 0
        return LaunchSamples(len(self.labels), self.lane_size if by_lane else 1)

    def _weight_places(self, i: int) -> tuple[slice, slice]:
        weight, bias = self.layout.places[2 * i : 2 * i + 2]
        return weight, bias


def _sent_shape(before: Layer) -> tuple[int, int, int]:
    """The shape of the gradient that goes back: of a pooled output itself, not of the pixels it took."""
    return before.out_shape if before.pool > 1 else before.grad_shape
