"""A mesh of workers: a group for each axis of a plan, and the one of all workers.

Axes from the outermost to the innermost: pipeline, data. Workers that differ only along an axis are a group.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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


def make_mesh(world: Group, plan: Plan) -> Mesh:
    """The groups of a plan for as many workers as there are; a collective."""
    plan = plan.for_workers(world.size)
    stage, number = divmod(world.rank, plan.data)
    along_data = range(stage * plan.data, (stage + 1) * plan.data)
    data = _part(world, f"data of stage {stage}", along_data)
    pipeline = _part(world, f"pipeline {number}", range(number, world.size, plan.data))
    if plan.shard == "none":
        return Mesh(world, data, pipeline)
    return Mesh(world, data, pipeline, _part(world, f"shard of stage {stage}", along_data, is_new=True))


def _part(world: Group, name: str, ranks: range, is_new: bool = False) -> Group:
    """The group of some workers, which lives with that of all; that of all itself unless it must be new."""
    if len(ranks) == 1:
        return Group()
    if len(ranks) == world.size and not is_new:
        return world
    if world.make_part is None:
        raise SpecError(f"--backend {world.backend} has no groups of some workers: leave --backend out")
    part = world.make_part(name, ranks)
    world.parts.append(part)
    if world.is_cut:  # while the part was formed
        part.cut()
    return part
