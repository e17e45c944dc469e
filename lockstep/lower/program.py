"""The interface of a program, a model in the form that a kernel set takes; a network executes it.

There are three programs: a fused chain, a fused residual network, a compiled model. `DeviceLowering` builds
the networks of a program, for training and for evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from lockstep.spec import Train

if TYPE_CHECKING:
    from lockstep.kernels.triton.conv.fused_layer import Layer
    from lockstep.kernels.triton.conv.tile_table import Table
    from lockstep.lower.eval_network import EvalNetwork
    from lockstep.lower.flat_table import DeviceNetwork, Layout, Make
    from lockstep.lower.layer_split import LaneWorkers

Load = Callable[[nn.Module], None]  # copies the weights of a model into a network


@dataclass(frozen=True)
class Block:
    """What a pipeline does not cut: the names of its modules; the first one names a cut before it."""

    modules: tuple[str, ...]

    def has(self, name: str) -> bool:
        """Whether a module, a parameter or a buffer of this name is in it."""
        return any(not module or f"{name}.".startswith(f"{module}.") for module in self.modules)


class Program(Protocol):
    """The layers to compute, and the place of a model's tensors in the flat tables of a network.

    `tensors` are the parameters that are trained, in their order, or those and then the floating buffers. The
    only other buffers are counts of batches.
    """

    @property
    def kernels(self) -> str:
        """The name of its kernel set."""

    @property
    def drops(self) -> tuple[str, ...]:
        """The names of the dropout layers; an empty name for a layer without dropout."""

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The fused layers; a compiled model has none."""

    @property
    def shares_norms(self) -> bool:
        """Whether it has batch norms that can see all lanes."""

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The model in pieces, in the order of the forward pass; a pipeline may cut between any two."""

    def part(self, own: range) -> Program:
        """Some of the blocks, one after another; a model whose other tensors are on `meta` fits it."""

    @property
    def make(self) -> Make:
        """Makes a network for a number of lanes."""

    def make_eval(self, lowering: DeviceLowering, lanes: int) -> tuple[EvalNetwork, Load]:
        """A network in eval mode for up to `lanes` blocks at once, and a function that sets its weights."""

    def facts(self, table: Table, precision: str) -> dict[str, str]:
        """What may change bits, besides the model itself: entries of the identity."""

    def uncompiled(self) -> Program:
        """The same without torch's compiler, which takes minutes for each number of lanes."""

    def to_flat(self, layout: Layout, tensors: Sequence[Tensor], flat: Tensor) -> None: ...
    def from_flat(self, layout: Layout, flat: Tensor, tensors: Sequence[Tensor]) -> None: ...


class _Tables(Protocol):
    """The weights of a network, their copy, and the place of each tensor in them."""

    layout: Layout
    weights: Tensor
    copy: Tensor


class PartNetwork(Protocol):
    """A network of some blocks for one lane, a stage of a pipeline; also a `DeviceNetwork`.

    What `leave` and `leave_back` give is not changed later.
    """

    layout: Layout
    weights: Tensor
    copy: Tensor
    lane_size: int
    labels: Tensor
    logits: Tensor
    keys: Tensor

    def share_with(self, workers: LaneWorkers | None) -> None:
        """Deal products out to these workers; None: compute all of each."""

    def make_weights(self) -> None:
        """Have new tables of weights."""

    def take_weights(self, weights: Tensor, copy: Tensor) -> None:
        """Use these tables, also those of another network of the same blocks."""

    def make_results(self, backward: bool) -> None:
        """Make the tables that a forward or a backward pass writes, after `drop_tables`."""

    def drop_tables(self) -> None:
        """Free weights and results between passes; activations stay."""

    def enter(self, given: Sequence[Tensor]) -> None:
        """Take images [N, H, W, C], or what the part before has sent."""

    def forward(self) -> None:
        """Compute what the part after it needs, or logits."""

    def leave(self) -> list[Tensor]:
        """What the part after it needs."""

    def enter_back(self, given: Sequence[Tensor]) -> None:
        """Take the gradients of what was sent to the part after it."""

    def backward(self) -> None:
        """Compute gradients; the last part begins with the loss."""

    def leave_back(self) -> list[Tensor]:
        """The gradients of what the part before has sent."""

    def sum_lanes(self, lanes: range, out: Tensor, bad: Tensor) -> None:
        """Write the lane's gradients, statistics, loss and right answers."""


def fill_weights(program: Program, network: _Tables, model: nn.Module) -> None:
    """Copy a model's parameters and statistics into a network, as far as they are in its blocks."""
    floats = [(name, buffer) for name, buffer in model.named_buffers() if buffer.is_floating_point()]
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    every = {name: tensor.detach() for name, tensor in (*trained, *floats)}
    tensors = [every[name] for name in names_in(program, every)]
    program.to_flat(network.layout, tensors, network.weights)
    network.copy.copy_(network.weights)


def names_in(program: Program, names: Iterable[str]) -> list[str]:
    """Those of the names of parameters and buffers that are in the blocks of a program."""
    blocks = program.blocks
    return [name for name in names if any(block.has(name) for block in blocks)]


@dataclass(frozen=True)
class DeviceLowering:
    """How whole steps run on the device: a program, and the tiles that its kernels use."""

    program: Program
    table: Table
    train: Train
    device: torch.device
    _networks: dict[int, DeviceNetwork] = field(default_factory=dict)

    def network(self, lanes: int) -> DeviceNetwork:
        """The network for this number of lanes; a chain is evaluated with the same one."""
        if lanes not in self._networks:
            self._networks.clear()
            self._networks[lanes] = self.program.make(lanes, self.train, self.device, self.table)
        return self._networks[lanes]

    def network_at_hand(self, lanes: int) -> DeviceNetwork:
        """One that is there and executes so many lanes or more; else a new one."""
        return next((n for n in self._networks.values() if n.lanes >= lanes), None) or self.network(lanes)

    def forget_networks(self) -> None:
        """Let go of networks that no step needs any more; evaluation keeps its own."""
        self._networks.clear()

    def eval_network(self, lanes: int) -> tuple[EvalNetwork, Load]:
        """A network that evaluates up to `lanes` blocks at once, and the function that sets its weights."""
        return self.program.make_eval(self, lanes)

    def part_network(self) -> PartNetwork:
        """A network of this part of a model for one lane."""
        network: Any = self.program.make(1, self.train, self.device, self.table)
        found: PartNetwork = network
        return found

    def part(self, own: range) -> DeviceLowering:
        """How a stage of a pipeline runs: some of the blocks."""
        return DeviceLowering(self.program.part(own), self.table, self.train, self.device)

    def uncompiled(self) -> DeviceLowering:
        """The same without torch's compiler, with networks of its own."""
        return DeviceLowering(self.program.uncompiled(), self.table, self.train, self.device)

    @property
    def is_fused(self) -> bool:
        return self.program.kernels == "fused"

    def facts(self) -> dict[str, str]:
        """What may change bits: the entries of the identity about kernels."""
        import triton

        version = triton.__version__ + (" interpreted" if triton.knobs.runtime.interpret else "")
        own = self.program.facts(self.table, self.train.precision)
        return {"set": self.program.kernels, **own, "triton": version}
