"""Executes a fused chain, in training and eval mode: forward pass, loss and backward pass of all lanes.

A gradient's path begins here: backward → lane tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from lockstep.kernels.cuda_stream import beside
from lockstep.kernels.triton.conv.fused_forward import forward
from lockstep.kernels.triton.conv.fused_gradient import input_grad, weight_grad
from lockstep.kernels.triton.conv.fused_layer import Layer
from lockstep.kernels.triton.conv.tile import lane_chunks
from lockstep.kernels.triton.conv.tile_table import Table
from lockstep.lower.flat_table import KernelNetwork, Slot
from lockstep.spec import Train


class ChainNetwork(KernelNetwork):
    """Runs `lanes` lanes of `lane_size` samples through a chain; each layer has a weight and a bias."""

    def __init__(
        self, layers: Sequence[Layer], lanes: int, train: Train, device: torch.device, table: Table
    ) -> None:
        self.layers, lane_size = list(layers), train.batch // train.lanes
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
        self._compact = [i == 0 and layer.pool > 1 for i, layer in enumerate(layers)]
        shapes = [
            layer.out_shape if compact else layer.grad_shape
            for layer, compact in zip(layers, self._compact, strict=True)
        ]
        self._g = [self.zeros(count, *shape) for shape in shapes]
        self.keys = self.zeros(len(layers), lanes, dtype=torch.int64)

    def forward(self, training: bool = True) -> None:
        """x[0] and the weights' copy → logits; dropout only in training."""
        for i in range(len(self.layers)):
            self.run("forward", i, training)

    def score(self) -> None:
        self.score_into(self._g[-1])

    def backward(self) -> None:
        self.score()
        self.average_scores()
        with beside(self._device) as launch:
            for i in reversed(range(len(self.layers))):
                launch(partial(self.run, "weight_grad", i))
                if i:
                    self.run("input_grad", i)

    def run(self, operation: str, i: int, training: bool = True) -> None:
        """Launch one operation of layer i."""
        layer, tile, precision = self.layers[i], self.tiles[i][operation], self.precision
        weight, bias = self.layout.places[2 * i : 2 * i + 2]
        is_last = i == len(self.layers) - 1
        if operation == "forward":
            forward(
                layer if training else replace(layer, dropout=0.0),
                self.x[i], self.copy[weight], self.weights[bias],
                self.logits if is_last else self.x[i + 1], self._code[i], tile,
                out_border=(0, 0) if is_last else self.layers[i + 1].pad,
                keys=self.keys[i], lane_size=self.lane_size, precision=precision,
            )  # fmt: skip
        elif operation == "weight_grad":
            weight_grad(
                layer, self._g[i], self._code[i], self.x[i], self.part(weight), self.part(bias),
                self.lanes, tile, compact=self._compact[i], precision=precision,
            )  # fmt: skip
        else:
            input_grad(
                layer, self.layers[i - 1], self._g[i], self.copy[weight], self.x[i], self._code[i - 1],
                self._g[i - 1], tile, compact=self._compact[i - 1], precision=precision,
            )  # fmt: skip
