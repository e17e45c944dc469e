"""The state of a run whose stages are on several workers: collects it at worker 0, makes the model whole.

Workers of one stage have the same part; the first of them speaks for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lockstep.comm.mesh import Mesh
from lockstep.models.tensors import replace_tensors


class StageParts:
    """This worker's part of a state, and the way to the others."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self.same = mesh, mesh.data

    def collect(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of all parts at worker 0, as copies on the CPU; elsewhere this worker's own."""
        world, found = self._mesh.world, {name: _copy(tensor) for name, tensor in own.items()}
        for name, owner, like in self._listed(own):
            if world.rank == owner and owner:
                world.send(found[name], 0)
            elif world.rank == 0 and owner:
                found[name] = like
                world.recv(found[name], owner)
        return found

    def make_whole(self, model: nn.Module, own: Mapping[str, Tensor], device: torch.device) -> None:
        """Give every worker all parameters and buffers of the model, at the end of a run."""
        world = self._mesh.world
        arrived = {}
        for name, owner, like in self._listed(own):
            arrived[name] = own[name].detach() if name in own else like.to(device)
            world.broadcast(arrived[name], owner)
        replace_tensors(model, lambda name, tensor: arrived[name] if tensor.is_meta else None)

    def _listed(self, own: Mapping[str, Tensor]) -> list[tuple[str, int, Tensor]]:
        """Every tensor in order of names: the first worker that has it, and an empty tensor like it."""
        mine = {
            name: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
            for name, tensor in own.items()
        }
        world = self._mesh.world
        found: dict[str, tuple[int, Tensor]] = {}
        for rank, text in enumerate(world.all_gather_bytes(json.dumps(mine).encode())):
            for name, (shape, dtype) in json.loads(text).items():
                found.setdefault(name, (rank, torch.empty(shape, dtype=getattr(torch, dtype))))
        return [(name, *found[name]) for name in sorted(found)]


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().clone()
