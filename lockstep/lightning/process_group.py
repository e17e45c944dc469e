"""A group of ours over the process group that Lightning makes, and how Lightning finds its processes."""

from __future__ import annotations

import socket

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.lsf import LSFEnvironment
from lightning.fabric.plugins.environments.mpi import MPIEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from lockstep.comm.group import Group
from lockstep.comm.shared_memory import Shared, share
from lockstep.comm.transport import TorchTransport

_SLOT = 1024  # bytes of a message that need no socket


class NearGroup(Group):
    """A group whose short messages go through memory that the workers of a host share, if there is some."""

    _memory: Shared | None = None
    _turn = 0

    def look_around(self) -> None:
        """Find out whether all workers are on one host; a collective."""
        self.on_one_host = len(set(self.all_gather_bytes(socket.gethostname().encode()))) == 1
        self._memory = share(self, 2 * _SLOT)

    def _gather_rows(self, row: bytes) -> list[bytes]:
        if self._memory is None or len(row) > _SLOT:
            return super()._gather_rows(row)
        # two slots in turn: who writes the next message knows that all have read the one before
        self._turn = 1 - self._turn
        mine = slice(self._turn * _SLOT, self._turn * _SLOT + len(row))
        self._memory.pieces[self.rank][mine].copy_(torch.frombuffer(bytearray(row), dtype=torch.uint8))
        self._memory.barrier()
        return [piece[mine].numpy().tobytes() for piece in self._memory.pieces]


def make_group() -> Group:
    """The workers of the default process group; without one, or alone in it, this process."""
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None or world.size() == 1:
        return Group()
    near = TorchTransport.of_script(world)
    host, gpu = near, None
    if near.name == "nccl":  # which carries no tensors of a CPU
        host, gpu = TorchTransport.of_script(dist.new_group(backend="gloo")), near
    group = NearGroup(world.rank(), world.size(), host, gpu)
    group.look_around()
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
