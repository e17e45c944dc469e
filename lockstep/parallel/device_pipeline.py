"""A program of fused or compiled kernels cut into the stages of a pipeline: each lowers its own blocks.

A cut is before a block of the program, where one activation goes across. Stages are balanced by the time of
every block with its own kernels, or by multiplications.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from lockstep.comm.mesh import Mesh
from lockstep.errors import ModelError
from lockstep.lower.fixed_lane import count_work
from lockstep.lower.layer_split import LaneWorkers
from lockstep.lower.program import DeviceLowering, names_in
from lockstep.models.tensors import trainable
from lockstep.parallel.cut import choose_cuts, named_cuts, share_of_work
from lockstep.parallel.schedule import Position
from lockstep.parallel.shard.device_part import DevicePart, find_parts
from lockstep.parallel.shard.gathered_model import GatheredModel, Use
from lockstep.spec.plan import Plan

_TIMES = 3  # each block is measured, the first time with its kernels' compilation; the shortest time counts


@dataclass
class DevicePipeline:
    """This worker's stage of a program, and what all stages are; a stage is one part, unless it is shared."""

    position: Position
    schedule: str
    names: set[str]  # of the parameters and buffers that it keeps
    whole: DeviceLowering  # of all stages
    own: range  # the blocks of its stage
    told: list[str]  # a line for each stage
    gathered: GatheredModel | None = None  # if its parameters are gathered part by part
    workers: LaneWorkers | None = None  # if its products are dealt out

    def __post_init__(self) -> None:
        self.parts = [DevicePart(self.whole.part(self.own))]
        self.uses: list[Use] = []  # the blocks of parameters that each part needs, if they are gathered

    def share(self, model: nn.Module, most_mb: float) -> list[list[str]]:
        """Cut the stage into parts of at most so many megabytes; the names of each one's parameters."""
        self.parts = find_parts(model, self.whole, self.own, most_mb)
        return [names for part in self.parts if (names := part.own(trainable(model)))]

    def gather(self, gathered: GatheredModel) -> None:
        """Gather parameters, in training and in evaluation."""
        names = trainable(gathered.model)
        self.gathered, self.uses = gathered, [gathered.blocks_of(part.own(names)) for part in self.parts]


def cut_program(
    model: nn.Module, lowering: DeviceLowering, images: Tensor, plan: Plan, mesh: Mesh
) -> DevicePipeline:
    """Cut a model's program; `images` are those of a lane. A collective: worker 0 chooses the cuts."""
    if lowering.train.sync_norm:
        raise ModelError(
            f"--plan {plan}: train.sync_norm=true needs all lanes at once, and a stage takes one by one: "
            "use train.sync_norm=false, which is another run, or a plan without pipeline and "
            "shard=parameters"
        )
    blocks, number = lowering.program.blocks, mesh.pipeline.rank
    labels, allowed = [block.modules[0] for block in blocks], range(1, len(blocks))
    is_cut = plan.pipeline > 1
    measured = is_cut and plan.cost == "measured" and not plan.cuts and mesh.world.rank == 0
    costs = _measure(lowering, images) if measured else _count(model, lowering, images)
    cuts = named_cuts(labels, allowed, plan.cuts) if plan.cuts else choose_cuts(costs, allowed, plan.pipeline)
    told = [
        f"stage {n}: from {labels[own.start]}, {share_of_work(costs, own)}"
        for n, own in _dealt(cuts, len(blocks))
    ]
    cuts, told = json.loads(mesh.world.broadcast_bytes(json.dumps([cuts, told]).encode()))
    own = dict(_dealt(cuts, len(blocks)))[number]
    every = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    names = set(names_in(lowering.program.part(own), every))
    return DevicePipeline(Position(number, plan.pipeline), plan.schedule, names, lowering, own, told)


def _dealt(cuts: list[int], count: int) -> list[tuple[int, range]]:
    """The blocks of every stage."""
    return [(n, range(first, stop)) for n, (first, stop) in enumerate(pairwise([0, *cuts, count]))]


def _count(model: nn.Module, lowering: DeviceLowering, images: Tensor) -> list[float]:
    """The multiplications of each block."""
    work = count_work(model, images[:1])
    model.train()
    return [
        float(sum(count for name, count in work.items() if block.has(name)))
        for block in lowering.program.blocks
    ]


@torch.no_grad()
def _measure(lowering: DeviceLowering, images: Tensor) -> list[float]:
    """The seconds of each block for a lane, forward and backward."""
    plain, device = lowering.uncompiled(), lowering.device
    every = range(len(lowering.program.blocks))
    networks = [plain.part(range(n, n + 1)).part_network() for n in every]
    seconds: list[list[float]] = [[] for _ in every]
    for _ in range(_TIMES):
        given = [images.permute(0, 2, 3, 1)]
        for n in every:
            networks[n].enter(given)
            seconds[n].append(_time(networks[n].forward, device))
            given = networks[n].leave() if n < every[-1] else []
        for n in reversed(every):
            if n < every[-1]:
                networks[n].enter_back(given)
            seconds[n][-1] += _time(networks[n].backward, device)
            given = networks[n].leave_back() if n else []
    return [min(times) for times in seconds]


def _time(compute: Callable[[], None], device: torch.device) -> float:
    start = time.perf_counter()
    compute()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
