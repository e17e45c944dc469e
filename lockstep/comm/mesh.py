"""A mesh of workers: a group for each axis of a plan, and the one of all workers.

Axes from the outermost to the innermost: pipeline, data. Workers that differ only along an axis are a group.
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
    """One worker's groups: of all workers, of those with the same stage, of those with the same lanes.

    `shard` are those with the same stage once more: shares are gathered while gradients are exchanged, and
    each needs an order of its own.
    """

    world: Group = field(default_factory=Group)
    data: Group = field(default_factory=Group)
    pipeline: Group = field(default_factory=Group)
    shard: Group = field(default_factory=Group)
    # (from stage, to stage): this worker and a neighbour. NCCL makes the calls of one communicator one after
    # another, so if both ways had the same one, what comes would wait for what goes, and there the reverse.
    ways: Mapping[tuple[int, int], Group] = field(default_factory=dict)


def make_mesh(world: Group, plan: Plan) -> Mesh:
    """The groups of a plan for as many workers as there are; a collective."""
    plan = plan.for_workers(world.size)
    stage, number = divmod(world.rank, plan.data)
    along_data, column = (
        range(stage * plan.data, (stage + 1) * plan.data),
        range(number, world.size, plan.data),
    )
    data = _part(world, f"data of stage {stage}", along_data)
    shard = _make_part(world, f"shard of stage {stage}", along_data) if plan.shard != "none" else Group()
    ways = {
        way: _make_part(world, f"pipeline {number}, stage {way[0]} to {way[1]}", [column[end] for end in way])
        for first, second in pairwise(range(plan.pipeline))
        for way in ((first, second), (second, first))
        if stage in way
    }
    return Mesh(world, data, _part(world, f"pipeline {number}", column), shard, ways)


def _part(world: Group, name: str, ranks: range) -> Group:
    """The group of some workers."""
    if len(ranks) == 1:
        return Group()
    return world if len(ranks) == world.size else _make_part(world, name, ranks)


def _make_part(world: Group, name: str, ranks: Sequence[int]) -> Group:
    """A new group of some workers, which lives with that of all."""
    if world.make_part is None:
        raise SpecError(f"--backend {world.backend} has no groups of some workers: leave --backend out")
    part = world.make_part(name, ranks)
    world.parts.append(part)
    if world.is_cut:  # while the part was formed
        part.cut()
    return part
