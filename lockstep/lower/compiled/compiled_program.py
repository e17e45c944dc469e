"""The program of a compiled model: which layers and arguments are allowed; its tensors in flat tables.

`compiled_network` executes it, `compiled_eval` in eval mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from lockstep.errors import ModelError
from lockstep.kernels.triton.conv.fused_layer import Layer
from lockstep.kernels.triton.conv.tile import KERNEL_TYPES
from lockstep.kernels.triton.conv.tile_table import Table
from lockstep.lower.batched import is_untouched
from lockstep.lower.compiled.compiled_block import chains_of, find_blocks
from lockstep.lower.compiled.compiled_eval import CompiledEval, fix_weights
from lockstep.lower.compiled.compiled_layer import look
from lockstep.lower.compiled.compiled_network import CompiledModel, CompiledNetwork, as_lying
from lockstep.lower.compiled.compiled_part import CompiledPart
from lockstep.lower.compiled.conv_probe import choose_convs, convs_digest
from lockstep.lower.compiled.lane_graph import LaneTracer
from lockstep.lower.compiled.network_probe import prove_convs
from lockstep.lower.compiled.node_check import check_call_sums
from lockstep.lower.eval_network import EvalNetwork
from lockstep.lower.flat_table import Layout, Make
from lockstep.lower.program import Block, DeviceLowering, Load
from lockstep.spec import Train

_MOST_SAMPLES, _MOST_VALUES = 2**15, 2**31  # the kernels' indices go no further
_COUNT = "num_batches_tracked"  # of a batch norm: a step adds one to it


@dataclass(frozen=True)
class CompiledProgram:
    """A model whose lanes torch compiles."""

    model: CompiledModel
    drops: tuple[str, ...]
    largest: int  # values in the largest layer's output for one sample
    values: int  # and in all layers' outputs
    is_part: bool = False  # whether a stage computes it lane by lane; it may have all blocks

    @property
    def kernels(self) -> str:
        return "compiled"

    @property
    def layers(self) -> tuple[Layer, ...]:
        """None is fused."""
        return ()

    @property
    def shares_norms(self) -> bool:
        return False

    def make_eval(self, lowering: DeviceLowering, lanes: int) -> tuple[EvalNetwork, Load]:
        """One block at a time: with stock kernels a sample's bits may depend on its batch."""
        train = lowering.train
        fixed = fix_weights(self.model.module, train.precision, self.model.has)
        size = train.batch // train.lanes
        network = CompiledEval(replace(self.model, module=fixed), size, train, lowering.device)
        return network, network.load

    def facts(self, table: Table, precision: str) -> dict[str, str]:
        return {"convolutions": convs_digest(self.model.convs)}

    def uncompiled(self) -> CompiledProgram:
        return replace(self, model=replace(self.model, compiles=False))

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self.model.blocks

    def part(self, own: range) -> CompiledProgram:
        """Some of the blocks."""
        model = self.model
        is_first, is_last = model.is_first and not own.start, model.is_last and own.stop == len(model.blocks)
        blocks = model.blocks[own.start : own.stop]
        part = replace(model, blocks=blocks, is_first=is_first, is_last=is_last)
        return replace(self, model=part, is_part=True)

    @property
    def make(self) -> Make:
        """Makes buffers and kernels for a number of lanes."""
        return partial(CompiledPart if self.is_part else CompiledNetwork, self.model)

    def to_flat(self, layout: Layout, tensors: Sequence[Tensor], flat: Tensor) -> None:
        """Copy tensors shaped as the parameters, or as those and the statistics, into a flat table."""
        for place, tensor in zip(layout.places, tensors, strict=False):
            as_lying(flat[place], tensor.shape).copy_(tensor)

    def from_flat(self, layout: Layout, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy a flat table into tensors shaped as the parameters, or as those and the statistics."""
        for place, tensor in zip(layout.places, tensors, strict=False):
            tensor.copy_(as_lying(flat[place], tensor.shape))


def find_compiled(
    model: nn.Module, image: tuple[int, int, int], train: Train, trains: bool = True
) -> CompiledProgram:
    """The program of a model all of whose calls are known; a ModelError names one that is not.

    A model that only evaluates (`trains` is false) needs no choice of how its convolutions run lanes.
    """
    for name, module in model.named_modules(remove_duplicate=False):
        _check(f"'{name or 'the model'}' ({type(module).__name__})", module, trains)
    device = next(model.parameters()).device
    try:
        copy = deepcopy(model).train(trains)
    except Exception as error:  # the user may keep anything in a module
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(f"the model cannot be copied: {reason}") from None
    if not all(module.training == trains for module in copy.modules()):
        raise ModelError("a layer of the model does not train with it")
    seen = look(copy, torch.zeros(2, *image, device=device))
    if trains and (train.batch >= _MOST_SAMPLES or seen.largest * train.batch >= _MOST_VALUES):
        raise ModelError(
            f"train.batch={train.batch} is too large: a layer has more values than its kernels count"
        )
    blocks, dtype = find_blocks(model), KERNEL_TYPES[train.precision][0]
    if not trains:
        for part in (chain for block in blocks for chain in chains_of(copy, block)):
            LaneTracer().find_calls(part)
        return CompiledProgram(CompiledModel(model, image, seen.classes, {}, blocks), (), *seen.counts)
    drops = check_call_sums(deepcopy(model).train(), image, train, blocks)
    convs = choose_convs(model, seen.shapes, train, dtype)
    return CompiledProgram(CompiledModel(model, image, seen.classes, convs, blocks), drops, *seen.counts)


def prove_lanes(program: CompiledProgram, train: Train, device: torch.device) -> CompiledProgram:
    """The program with convolutions that run so that the network has the same bits in any number of lanes."""
    convs = prove_convs(program.model, program.values, train, device)
    return replace(program, model=replace(program.model, convs=convs))


def _check(what: str, module: nn.Module, trains: bool) -> None:
    """Refuse what a network on the device would not do as the module does."""
    if not is_untouched(module):
        raise ModelError(f"{what} has a hook or a forward of its owner's")
    if type(module) is nn.Conv2d and (module.padding_mode != "zeros" or isinstance(module.padding, str)):
        raise ModelError(f"the padding of {what} is not by numbers and zeros")
    if not trains:
        return
    if any(parameter.dtype != torch.float32 for parameter in module.parameters(recurse=False)):
        raise ModelError(f"a parameter of {what} is not in fp32")
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.dtype != torch.float32 and name != _COUNT:
            raise ModelError(f"buffer '{name}' of {what} is not in fp32")
    if type(module) is nn.BatchNorm2d and not (
        module.affine and module.track_running_stats and module.momentum is not None
    ):
        raise ModelError(f"{what} is a batch norm without parameters, running statistics or momentum")
