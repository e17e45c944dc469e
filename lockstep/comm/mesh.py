"""A mesh of workers: a group for each axis of a plan, and the one of all workers.

Axes from the outermost to the innermost: pipeline, data, spatial, channel. Workers that differ only along an
axis are a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from lockstep.comm.group import Group
from lockstep.errors import SpecError
from lockstep.spec.plan import Plan


@dataclass(frozen=True)
class Mesh:
    """One worker's groups: of all workers, of those that differ only along an axis, of those of its stage.

    `shard` are those along data once more: shares are gathered, and split layers computed, while gradients
    are exchanged, and each needs an order of its own. So do `spatial` and `channel`, which speak while a
    layer is computed: neither is ever the group of all workers or of the stage, even if it has the same
    members.
    """

    world: Group = field(default_factory=Group)
    data: Group = field(default_factory=Group)
    pipeline: Group = field(default_factory=Group)
    shard: Group = field(default_factory=Group)
    # (from stage, to stage): this worker and a neighbour. NCCL makes the calls of one communicator one after
    # another, so if both ways had the same one, what comes would wait for what goes, and there the reverse.
    ways: Mapping[tuple[int, int], Group] = field(default_factory=dict)
    stage: Group = field(default_factory=Group)  # all workers of this one's stage
    spatial: Group = field(default_factory=Group)
    channel: Group = field(default_factory=Group)


def plain_mesh(world: Group) -> Mesh:
    """The groups of workers that are along data only."""
    return Mesh(world, world, stage=world)


def make_mesh(world: Group, plan: Plan) -> Mesh:
    """The groups of a plan for as many workers as there are; a collective."""
    plan = plan.for_workers(world.size)
    size = plan.data * plan.cells
    stage, place = divmod(world.rank, size)
    cell, first = world.rank % plan.cells, stage * size
    lane, row = world.rank - cell, world.rank - cell % plan.channel  # the first of each
    at = f", cell {cell}" if plan.splits_layers else ""  # which rows and channels

    along_data, column = range(first + cell, first + size, plan.cells), range(place, world.size, size)
    data = part_of(world, f"data of stage {stage}{at}", along_data)
    shard = _make_part(world, f"shard of stage {stage}{at}", along_data) if plan.shares_data else Group()
    ways = {
        way: _make_part(world, f"pipeline {place}, stage {way[0]} to {way[1]}", [column[end] for end in way])
        for before, after in pairwise(range(plan.pipeline))
        for way in ((before, after), (after, before))
        if stage in way
    }
    return Mesh(
        world,
        data,
        part_of(world, f"pipeline {place}", column),
        shard,
        ways,
        part_of(world, f"stage {stage}", range(first, first + size)) if plan.splits_layers else data,
        _own(world, "spatial", range(lane + cell % plan.channel, lane + plan.cells, plan.channel)),
        _own(world, "channel", range(row, row + plan.channel)),
    )


def part_of(world: Group, name: str, ranks: range) -> Group:
    """The group of some workers, for which each of them asks; it lives with that of all."""
    if len(ranks) == 1:
        return Group()
    return world if len(ranks) == world.size else _make_part(world, name, ranks)


def _own(world: Group, axis: str, ranks: range) -> Group:
    """The group of some workers, with a communicator of its own even if they are all."""
    return _make_part(world, f"{axis} from worker {ranks[0]}", ranks) if len(ranks) > 1 else Group()


def _make_part(world: Group, name: str, ranks: Sequence[int]) -> Group:
    """A new group of some workers, which lives with that of all."""
    if world.make_part is None:
        raise SpecError(f"--backend {world.backend} has no groups of some workers: leave --backend out")
    part = world.make_part(name, ranks)
    world.parts.append(part)
    if world.is_cut:  # while the part was formed
        part.cut()
    return part
