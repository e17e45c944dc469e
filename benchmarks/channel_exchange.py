"""One worker of AlexNet's exchange alone: the messages of a step by data, and with layers by channel.

Nothing is computed but the sums of gradients that arrive. `channel_bytes.py` starts it on every node.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from reduction import slowest
from shaped_link import address
from torch import Tensor, nn

from lockstep.comm.bucket import ReducedTensor, split
from lockstep.comm.group import Group
from lockstep.comm.reducer import BUCKET_MB, Reducer
from lockstep.comm.transport import TorchTransport
from lockstep.comm.tree import worker_lanes
from lockstep.models.alexnet import AlexNet
from lockstep.parallel.mix.lane_round import LaneForm, LaneRound
from lockstep.parallel.mix.layer_pattern import find_layers
from lockstep.parallel.mix.mixed_linear import MixedLinear
from lockstep.parallel.mix.row_cut import RowCut

BATCH, LANES, WORKERS, LAYERS = 256, 8, 4, ("hidden*", "classifier")
SAMPLES, NUMBERS, PORT = BATCH // LANES, 4, 29631  # of a lane; beside gradients; of the store


class SilentCut(RowCut):
    """The shapes of a layer's parts without their values."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # type: ignore[override]
        return x.new_empty(len(x), len(self.own))

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.new_empty(0)

    def partial_sum(self, dy: Tensor, weight: Tensor) -> Tensor:
        return dy.new_empty(len(dy), self.ins)

    def add_up(self, partials: object) -> Tensor:
        return torch.empty(0)


def find_weights(mixed: bool) -> tuple[dict[str, nn.Linear], list[ReducedTensor]]:
    """Layers by channel, and what is reduced by data, as a step has it."""
    with torch.device("meta"):
        model = AlexNet(3, 1000, (224, 224))
    layers = find_layers(model, LAYERS) if mixed else []
    taken = {f"{name}.weight" for name in layers}
    rest = [p.detach() for name, p in model.named_parameters() if name not in taken]
    entries = [ReducedTensor(torch.zeros(p.shape)) for p in reversed(rest)]
    linear = {name: module for name, module in model.named_modules() if name in layers}
    return linear, [*entries, *[ReducedTensor(torch.zeros(()))] * NUMBERS]  # type: ignore[return-value]


def formula_bytes(rank: int, mixed: bool) -> int:
    """What a worker sends in a step: 2 (W − 1) ⌈P / W⌉ numbers a bucket, and those of its layers."""
    layers, entries = find_weights(mixed)
    own = len(worker_lanes(LANES, WORKERS, rank))
    lengths = [sum(entries[i].like.numel() for i in b) for b in split(entries, BUCKET_MB * 1e6)]
    num_bytes = sum(4 * 2 * (WORKERS - 1) * -(-length // WORKERS) for length in lengths)
    for layer in layers.values():
        cut = RowCut(layer.in_features, layer.out_features, WORKERS, WORKERS, rank)
        num_bytes += SAMPLES * cut.sent_bytes(LANES, own, True, torch.float32)
    return num_bytes


def make_exchange(group: Group, mixed: bool) -> Callable[[], None]:
    """All messages of a step."""
    linear, entries = find_weights(mixed)
    grads, rounds = [entry.like for entry in entries], LaneRound(group, LANES)
    reducer, layers = Reducer(group, LANES, entries, overlap=False), []
    for name, module in linear.items():
        cut = SilentCut(module.in_features, module.out_features, WORKERS, WORKERS, group.rank)
        layers.append(MixedLinear(name, nn.Linear(1, 1, bias=False), cut, rounds, None))
        layers[-1].form = LaneForm(SAMPLES, torch.float32, torch.device("cpu"))
        layers[-1].rows = lambda: torch.empty(0)
    given = {layer.name: torch.zeros(SAMPLES, max(layer.cut.ins, layer.cut.outs)) for layer in layers}

    def run() -> None:
        for number in range(rounds.count if layers else 0):
            rounds.begin(number)
            for layer in layers:
                layer.forward(given[layer.name][:, : layer.cut.ins].contiguous())
            for layer in reversed(layers):
                layer.backward(given[layer.name][:, : layer.cut.outs], needs_input=True)
        reducer.begin()
        reducer.add(grads, (LANES // WORKERS).bit_length() - 1)
        reducer.finish()

    return run


def main() -> None:
    torch.set_num_threads(1)
    rank, rounds = int(sys.argv[1]), int(sys.argv[2])
    wait = timedelta(minutes=2)
    store = dist.TCPStore(address(0), PORT, WORKERS, is_master=rank == 0, timeout=wait)
    group = Group(rank, WORKERS, TorchTransport("gloo", store, rank, WORKERS, address(rank)))
    works = {"data": make_exchange(group, False), "mix": make_exchange(group, True)}
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            seconds = slowest(group, work)
            if number:  # not the first, in which buffers are touched
                times[name].append(seconds)
    print(f"{statistics.median(times['data']):.2f} s by data, {statistics.median(times['mix']):.2f} s mixed")
    print(json.dumps(times), flush=True)
    group.close()


if __name__ == "__main__":
    main()
