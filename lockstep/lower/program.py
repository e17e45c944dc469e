"""A program: a model in the form that the kernels of the device take. A network is what executes it.

Each kernel set has its own: a fused chain, a fused residual network, a compiled model. `DeviceLowering` makes
the networks of a program: for training, and for evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from lockstep.spec import Train

if TYPE_CHECKING:
    from lockstep.kernels.triton.conv.fused_layer import Layer
    from lockstep.kernels.triton.conv.tile_table import Table
    from lockstep.lower.eval_network import EvalNetwork
    from lockstep.lower.flat_table import DeviceNetwork, Layout, Make

Load = Callable[[nn.Module], None]  # lets a network compute with the weights of a model


class Program(Protocol):
    """What to compute, and how a model's tensors lie in the flat tables of a network.

    Tensors are the parameters in their order, or those and then the floating buffers. The only other buffers
    are counts of batches.
    """

    @property
    def kernels(self) -> str:
        """The kernel set that it is for."""

    @property
    def drops(self) -> tuple[str, ...]:
        """The names of the dropout layers; an empty name for a layer without."""

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The fused layers; a compiled model has none."""

    @property
    def shares_norms(self) -> bool:
        """Whether it has batch norms that can see all lanes."""

    @property
    def make(self) -> Make:
        """Makes a network for a number of lanes."""

    def make_eval(self, lowering: DeviceLowering, lanes: int) -> tuple[EvalNetwork, Load]:
        """A network in eval mode for so many blocks at once, or fewer."""

    def facts(self, table: Table, precision: str) -> dict[str, str]:
        """What of it may change bits, beside the model itself."""

    def uncompiled(self) -> Program:
        """The same without torch's compiler, which takes minutes for each number of lanes."""

    def to_flat(self, layout: Layout, tensors: Sequence[Tensor], flat: Tensor) -> None: ...
    def from_flat(self, layout: Layout, flat: Tensor, tensors: Sequence[Tensor]) -> None: ...


class _Tables(Protocol):
    """The weights of a network and their copy, and where each lies."""

    layout: Layout
    weights: Tensor
    copy: Tensor


def fill_weights(program: Program, network: _Tables, model: nn.Module) -> None:
    """Let a network compute with a model's parameters and statistics."""
    floats = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    program.to_flat(network.layout, [*(p.detach() for p in model.parameters()), *floats], network.weights)
    network.copy.copy_(network.weights)


@dataclass(frozen=True)
class DeviceLowering:
    """How whole steps run on the device: a program, and the tiles that its kernels use."""

    program: Program
    table: Table
    train: Train
    device: torch.device
    _networks: dict[int, DeviceNetwork] = field(default_factory=dict)

    def network(self, lanes: int) -> DeviceNetwork:
        """What executes so many lanes; the evaluation of a chain shares it."""
        if lanes not in self._networks:
            self._networks.clear()
            self._networks[lanes] = self.program.make(lanes, self.train, self.device, self.table)
        return self._networks[lanes]

    def network_at_hand(self, lanes: int) -> DeviceNetwork:
        """One that is there and executes so many lanes or more; else a new one."""
        return next((n for n in self._networks.values() if n.lanes >= lanes), None) or self.network(lanes)

    def eval_network(self, lanes: int) -> tuple[EvalNetwork, Load]:
        """What evaluates so many blocks at once, or fewer, and how it takes a model's weights."""
        return self.program.make_eval(self, lanes)

    def uncompiled(self) -> DeviceLowering:
        """The same without torch's compiler, with networks of its own."""
        return DeviceLowering(self.program.uncompiled(), self.table, self.train, self.device)

    @property
    def is_fused(self) -> bool:
        return self.program.kernels == "fused"

    def facts(self) -> dict[str, str]:
        """What of it may change bits."""
        import triton

        version = triton.__version__ + (" interpreted" if triton.knobs.runtime.interpret else "")
        own = self.program.facts(self.table, self.train.precision)
        return {"set": self.program.kernels, **own, "triton": version}
