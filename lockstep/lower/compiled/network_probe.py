"""Compiled model, a probe: whether the whole network gives the same bits with several lanes as lane by lane.

`conv_probe` compares the convolutions one by one. This probe compares the loss, logits, gradients and
statistics of the whole network, on fixed values and without torch's compiler. The compiler makes only
pointwise kernels, and tests check these. The choice does not depend on the number of workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from lockstep.comm.tree import LaneTree
from lockstep.errors import ModelError
from lockstep.kernels import random
from lockstep.kernels.cuda_graph import run_first
from lockstep.kernels.stock.lane_function import Conv
from lockstep.kernels.triton.conv.tile_table import Table
from lockstep.lower.compiled.compiled_network import CompiledModel, CompiledNetwork, as_lying
from lockstep.lower.fixed_lane import fixed_values, fixed_weights
from lockstep.spec import Train

_SHARE = 0.25  # of a GPU's memory that the probe may take
_VALUE_BYTES = 8  # for each value of a layer's output, with what is saved for the backward pass


def prove_convs(model: CompiledModel, values: int, train: Train, device: torch.device) -> Mapping[str, Conv]:
    """How the convolutions run: as `conv_probe` found if the network agrees, else all of them lane by lane.

    `values` is the number of values in all layers' outputs for one sample.
    """
    if train.lanes == 1 or next(model.module.parameters()).is_meta:  # nothing to compare
        return model.convs
    lanes = _most_lanes(values, train, device)
    alone = {
        name: conv._replace(forward_at_once=False, gradient_at_once=False)
        for name, conv in model.convs.items()
    }
    for convs in (model.convs, alone):
        if is_same_at_once(replace(model, convs=convs, compiles=False), lanes, train, device):
            return convs
    raise ModelError(
        "its lanes give other bits at once than one by one, although every convolution runs lane by lane"
    )


def is_same_at_once(model: CompiledModel, lanes: int, train: Train, device: torch.device) -> bool:
    """Whether 2, 4, … `lanes` lanes at once give every bit that they give one by one."""
    network = CompiledNetwork(model, lanes, train, device, Table())
    _fill(network, model)
    found: list[bool] = []
    run_first(lambda: found.append(_compare(network, lanes)), device)
    return found[-1]


def _compare(network: CompiledNetwork, lanes: int) -> bool:
    tree, logits, same = LaneTree(), [], True
    for count in range(1, lanes + 1):
        sums, own = _run(network, range(count - 1, count))
        tree.add([sums])
        logits.append(own)
        if count > 1 and count.bit_count() == 1:
            at_once, every = _run(network, range(count))
            same = same and _equal(at_once, tree.root()[1][0]) and _equal(every, torch.cat(logits))
    return same


def _most_lanes(values: int, train: Train, device: torch.device) -> int:
    """All lanes of the run, or as many as surely fit into memory: depends on shapes and the kind of GPU."""
    lanes, lane_bytes = train.lanes, values * _VALUE_BYTES * (train.batch // train.lanes)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        while lanes > 1 and lanes * lane_bytes > memory * _SHARE:
            lanes //= 2
    return lanes


@torch.no_grad()
def _fill(network: CompiledNetwork, model: CompiledModel) -> None:
    """Fixed weights, statistics, images, labels and keys of dropout."""
    with fixed_weights(model.module):
        floats = [buffer for buffer in model.module.buffers() if buffer.is_floating_point()]
        trained = [p for p in model.module.parameters() if p.requires_grad]
        for place, tensor in zip(network.layout.places, [*trained, *floats], strict=True):
            as_lying(network.weights[place], tensor.shape).copy_(tensor)
    network.x[0].copy_(fixed_values("images", network.x[0]) * 4)
    for name, table, bound in (
        ("labels", network.labels, network.logits.shape[1]),
        ("keys", network.keys, 2**31),
    ):
        counter = torch.arange(table.numel(), device=table.device)
        table.copy_(random.integers(random.key("together", name), counter, bound).view(table.shape))


def _run(network: CompiledNetwork, lanes: range) -> tuple[Tensor, Tensor]:
    """The sums over lanes, and the logits of their samples."""
    out = torch.zeros_like(network.weights)
    network.sum_lanes(lanes, out, torch.zeros(1, dtype=torch.int32, device=out.device))
    rows = slice(lanes.start * network.lane_size, lanes.stop * network.lane_size)
    return out, network.logits[rows].clone()


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))
