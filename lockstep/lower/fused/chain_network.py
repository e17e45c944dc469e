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
from lockstep.kernels.triton.conv.tile import lane_chunks
from lockstep.kernels.triton.conv.tile_table import Table
from lockstep.lower.flat_table import KernelNetwork, Slot, fill_inside, inside
from lockstep.spec import Train


class ChainNetwork(KernelNetwork):
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
            self.score()
            self.average_scores()
        with beside(self._device) as launch:
            for i in reversed(range(len(self.layers))):
                launch(partial(self.run, "weight_grad", i))
                if i or self._before:
                    self.run("input_grad", i)

    def leave(self) -> list[Tensor]:
        return [self._out.clone()]

    def enter_back(self, given: Sequence[Tensor]) -> None:
        """Put every value of a gradient at the pixel that pooling took, as `input_grad` does."""
        layer, g, code, (grad,) = self.layers[-1], self._g[-1], self._code[-1], given
        if code is None or self._compact[-1]:
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
        """Launch one operation of layer i."""
        layer, tile, precision = self.layers[i], self.tiles[i][operation], self.precision
        weight, bias = self.layout.places[2 * i : 2 * i + 2]
        is_last = i == len(self.layers) - 1
        if operation == "forward":
            forward(
                layer if training else replace(layer, dropout=0.0),
                self.x[i], self.copy[weight], self.weights[bias],
                self._out if is_last else self.x[i + 1], self._code[i], tile,
                out_border=(0, 0) if is_last else self.layers[i + 1].pad,
                keys=self.keys[i], lane_size=self.lane_size, precision=precision,
            )  # fmt: skip
        elif operation == "weight_grad":
            weight_grad(
                layer, self._g[i], self._code[i], self.x[i], self.part(weight), self.part(bias),
                self.lanes, tile, compact=self._compact[i], precision=precision,
            )  # fmt: skip
        elif i:
            input_grad(
                layer, self.layers[i - 1], self._g[i], self.copy[weight], self.x[i], self._code[i - 1],
                self._g[i - 1], tile, compact=self._compact[i - 1], precision=precision,
            )  # fmt: skip
        else:
            before, g = self._before, self._g_before
            assert before and g is not None
            input_grad(
                layer, before, self._g[i], self.copy[weight], self.x[i], None, g, tile,
                compact=before.pool > 1, precision=precision,
            )  # fmt: skip


def _sent_shape(before: Layer) -> tuple[int, int, int]:
    """The shape of the gradient that goes back: of a pooled output itself, not of the pixels it took."""
    return before.out_shape if before.pool > 1 else before.grad_shape
