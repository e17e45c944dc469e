"""The groups of a plan: who is in them, and that those used at the same time are never one."""

import pytest
import torch
import torch.distributed as dist
from world import in_threads

from lockstep.comm.mesh import make_mesh, plain_mesh
from lockstep.comm.rendezvous import Place, form
from lockstep.spec.plan import read_plan

pytestmark = pytest.mark.gloo
CPU = torch.device("cpu")
PLANS = [
    "channel=2",
    "spatial=3",
    "spatial=2,channel=2",
    "data=2,channel=2",
    "pipeline=2,spatial=2",
    "data=2,pipeline=3,shard=optimizer",
    "data=2,spatial=2,channel=2,shard=gradients",
    "data=2,pipeline=2,spatial=2,channel=2",
]

# which of (stage, data, spatial, channel) the workers of a group have in common
AXES = {
    "world": (),
    "stage": (0,),
    "data": (0, 2, 3),
    "shard": (0, 2, 3),
    "pipeline": (1, 2, 3),
    "spatial": (0, 1, 3),
    "channel": (0, 1, 2),
}


def members(group, rank):
    """The ranks of a group's workers among all, as they tell each other."""
    found = torch.zeros(group.size, 1, dtype=torch.int64)
    group.all_gather(found, torch.tensor([rank]))
    return found.flatten().tolist()


def coordinates(plan, rank):
    """Stage, and number along data, spatial and channel."""
    rest, channel = divmod(rank, plan.channel)
    rest, spatial = divmod(rest, plan.spatial)
    return *divmod(rest, plan.data), spatial, channel


@pytest.mark.parametrize("text", PLANS)
def test_workers_that_differ_only_along_an_axis_are_a_group(text):
    plan = read_plan(text)
    plan = plan.for_workers(plan.workers or plan.least)
    size, store = plan.workers, dist.HashStore()

    def work(outer):
        world = form(store, Place(outer.rank, size, "gloo", "127.0.0.1", CPU, True))
        mesh, rank = make_mesh(world, plan), outer.rank
        groups = {name: getattr(mesh, name) for name in AXES}
        found = {name: members(group, rank) for name, group in groups.items() if group.size > 1}
        ways = {way: members(group, rank) for way, group in mesh.ways.items()}
        outer.barrier()
        own = [g for g in (mesh.world, mesh.spatial, mesh.channel, *mesh.ways.values()) if g.size > 1]
        assert len({id(group) for group in own}) == len(own)
        assert mesh.shard.size == 1 or mesh.shard is not mesh.data
        assert {id(g) for g in (mesh.spatial, mesh.channel)}.isdisjoint(map(id, (mesh.stage, mesh.data)))
        outer.barrier()
        world.close()
        return found, ways

    every = in_threads(size, work)
    place = {rank: coordinates(plan, rank) for rank in range(size)}
    for rank, (found, ways) in enumerate(every):
        wanted = {
            name: [other for other in place if all(place[other][n] == place[rank][n] for n in fixed)]
            for name, fixed in AXES.items()
            if name != "shard" or plan.shard != "none"
        }
        assert found == {name: ranks for name, ranks in wanted.items() if len(ranks) > 1}
        stage = place[rank][0]
        pairs = [(a, b) for a in range(plan.pipeline) for b in range(plan.pipeline) if abs(a - b) == 1]
        column = wanted["pipeline"]
        assert ways == {(a, b): [column[a], column[b]] for a, b in pairs if stage in (a, b)}


def test_workers_along_data_only_are_one_stage():
    def work(group):
        mesh = plain_mesh(group)
        assert mesh.world is mesh.data is mesh.stage is group
        return mesh.channel.size, mesh.spatial.size, mesh.pipeline.size

    assert in_threads(2, work) == [(1, 1, 1)] * 2
