"""Times the tiles of a model's fused kernels and writes the fastest as a table, for `lockstep bench tune`.

Training only looks tiles up. Every candidate is compiled beforehand, by several processes at once, since
compiling takes longer than all else.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.kernels.triton.conv.fused_layer import Layer
from lockstep.kernels.triton.conv.tile import KERNEL_TYPES, Tile, lane_chunks
from lockstep.kernels.triton.conv.tile_table import OPERATIONS, Table, moves_boxes, tile_key, tile_rule
from lockstep.kernels.triton.conv.tma_box import LEAST, takes_boxes
from lockstep.spec import Train

_SHARED_BYTES = 227 * 1024  # of a multiprocessor
_WARM_MS, _TIMED_MS = 3, 12


class TunableNetwork(Protocol):
    """A network of fused layers, of which single operations can be run with other tiles."""

    x: list[Tensor]
    labels: Tensor
    logits: Tensor
    weights: Tensor
    copy: Tensor
    tiles: list[dict[str, Tile]]  # of each layer's operations

    def forward(self) -> None: ...
    def backward(self) -> None: ...
    def run(self, operation: str, i: int) -> None: ...


Make = Callable[[int, Train, torch.device, Table], Any]  # a TunableNetwork for so many lanes


@dataclass(frozen=True)
class Candidate:
    """A tile for one operation of one layer."""

    operation: str
    layer: int
    tile: Tile


def candidates(layers: Sequence[Layer], train: Train, boxes: bool = True) -> Iterator[Candidate]:
    """Every tile worth a try: those of the rule, and products of powers of two that fit on the chip."""
    known, precision, lane_size = set(), train.precision, train.batch // train.lanes
    for i, layer in enumerate(layers):
        for operation in OPERATIONS if i else ("forward", "weight_grad"):
            name = tile_key(operation, layer, precision)
            if name in known:
                continue
            known.add(name)
            base = tile_rule(operation, layer, precision, boxes)
            sizes = lane_size, lane_chunks(base.parts, train.lanes, lane_size)
            if base.boxes and not takes_boxes(operation, layer, base, *sizes):
                base = tile_rule(operation, layer, precision, boxes=False)
            found = {base}
            rows, cols, depths = _box_sizes(operation) if base.boxes else _sizes(operation, layer)
            for size in product(rows, cols, depths, (4, 8), (2, 3, 4)):
                tile = Tile(*size, parts=base.parts, boxes=base.boxes)
                suits = not tile.boxes or takes_boxes(operation, layer, tile, *sizes)
                if suits and _fits(tile, precision):
                    found.add(tile)
            yield from (Candidate(operation, i, tile) for tile in sorted(found, key=repr))


def _sizes(operation: str, layer: Layer) -> tuple[list[int], list[int], list[int]]:
    """Rows, columns and depths that go with the shapes of an operation."""
    ci, co = layer.in_channels, layer.out_channels
    if operation == "weight_grad":
        return _powers(co, 16, 128), _powers(layer.depth, 16, 256), [32, 64, 128]
    columns, depth = (co, ci) if operation == "forward" else (ci, co)
    depths = [d for d in (32, 64, 128) if depth % d == 0] or [16]
    return [32, 64, 128, 256], _powers(columns, 16, 128), depths


def _box_sizes(operation: str) -> tuple[list[int], list[int], list[int]]:
    """Rows, columns and depths of boxes: a warp group multiplies 64 channels."""
    pixels = [LEAST, 2 * LEAST]
    return ([64, 128], [64, 128], [64, 128]) if operation == "weight_grad" else (pixels, [64, 128], [64])


def _powers(size: int, least: int, most: int) -> list[int]:
    """Powers of two up to the first that covers `size`, the largest two or three of them."""
    top = min(max(1 << (size - 1).bit_length(), least), most)
    return [n for n in (top, top // 2, top // 4) if n >= least]


def _fits(tile: Tile, precision: str) -> bool:
    """Whether the sums fit into registers and what is read ahead into shared memory."""
    width = KERNEL_TYPES[precision][0].itemsize
    ahead = (tile.rows + tile.cols) * tile.depth * width * tile.stages
    sums = tile.rows * tile.cols
    return ahead <= _SHARED_BYTES and 1024 <= sums <= 128 * 32 * tile.warps and sums >= 256 * tile.warps


def tune(
    make: Make,
    layers: Sequence[Layer],
    train: Train,
    device: torch.device,
    progress: Callable[[str, int, int], None],
    processes: int,
) -> dict[str, Tile]:
    """The fastest tile of each operation on a GPU, with all lanes of a batch."""
    every = list(candidates(layers, train, moves_boxes(device)))
    work = [(make, train, device, every[n::processes]) for n in range(processes)]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for number, _ in enumerate(pool.map(_compile, work), 1):
            progress("compiling", number, processes)
    network = _network(make, train, device, train.lanes)
    best: dict[str, tuple[float, Tile]] = {}
    for number, candidate in enumerate(every, 1):
        name = tile_key(candidate.operation, layers[candidate.layer], train.precision)
        milliseconds = _time(network, candidate)
        if milliseconds is not None and milliseconds < best.get(name, (float("inf"),))[0]:
            best[name] = milliseconds, candidate.tile
        progress("timing", number, len(every))
    return {name: tile for name, (_, tile) in best.items()}


def _network(make: Make, train: Train, device: torch.device, lanes: int) -> TunableNetwork:
    """Buffers with random values: on zeros some kernels are faster."""
    network: TunableNetwork = make(lanes, train, device, Table(boxes=moves_boxes(device)))
    network.x[0].normal_()
    network.copy.normal_(std=0.05)
    network.weights.copy_(network.copy.abs())
    network.labels.random_(0, network.logits.shape[1])
    network.forward()
    network.backward()
    return network


def _compile(work: tuple[Make, Train, torch.device, list[Candidate]]) -> None:
    make, train, device, every = work
    torch.cuda.set_device(device)
    network = _network(make, train, device, lanes=1)  # many processes share the device's memory
    for candidate in every:
        _launch(network, candidate)


def _launch(network: TunableNetwork, candidate: Candidate) -> bool:
    """Whether a candidate runs at all: a compiler may refuse it, or a chip have too little for it."""
    tiles = network.tiles[candidate.layer]
    before, tiles[candidate.operation] = tiles[candidate.operation], candidate.tile
    try:
        network.run(candidate.operation, candidate.layer)
        torch.cuda.synchronize(network.weights.device)
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError) or "CUDA error" in str(error):
            raise
        tiles[candidate.operation] = before
        return False
    return True


def _time(network: TunableNetwork, candidate: Candidate) -> float | None:
    from triton.testing import do_bench

    if not _launch(network, candidate):
        return None
    return float(
        do_bench(
            lambda: network.run(candidate.operation, candidate.layer),
            warmup=_WARM_MS,
            rep=_TIMED_MS,
            return_mode="median",
        )
    )
