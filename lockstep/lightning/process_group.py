"""A group of ours over the process group that Lightning makes, and how Lightning finds its processes."""

from __future__ import annotations

import socket

import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.lsf import LSFEnvironment
from lightning.fabric.plugins.environments.mpi import MPIEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from lockstep.comm.group import Group
from lockstep.comm.transport import TorchTransport


def make_group() -> Group:
    """The workers of the default process group; without one, or alone in it, this process."""
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None or world.size() == 1:
        return Group()
    near = TorchTransport.of_script(world)
    host, gpu = near, None
    if near.name == "nccl":  # which carries no tensors of a CPU
        host, gpu = TorchTransport.of_script(dist.new_group(backend="gloo")), near
    group = Group(world.rank(), world.size(), host, gpu)
    group.on_one_host = len(set(group.all_gather_bytes(socket.gethostname().encode()))) == 1
    return group


def find_environment() -> ClusterEnvironment | None:
    """None, so that Lightning searches; where mpi4py has no MPI library, that would end with an error."""
    if any(kind.detect() for kind in (TorchElasticEnvironment, SLURMEnvironment, LSFEnvironment)):
        return None
    try:
        MPIEnvironment.detect()
    except RuntimeError:
        return LightningEnvironment()
    return None
