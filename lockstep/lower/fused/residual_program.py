"""The program of a fused residual network: finds the units of a ResNet, and maps its tensors to flat tables.

`residual_network` executes it in training, `residual_eval` in eval mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor, nn

from lockstep.kernels.global_average import GlobalAverage
from lockstep.kernels.triton.conv.fused_layer import Layer
from lockstep.kernels.triton.conv.tile_table import Table
from lockstep.lower.batched import is_untouched
from lockstep.lower.eval_network import EvalNetwork
from lockstep.lower.flat_table import Layout, Make
from lockstep.lower.fused.residual_eval import ResidualEval
from lockstep.lower.fused.residual_network import ResidualNetwork
from lockstep.lower.fused.residual_part import ResidualPart
from lockstep.lower.fused.residual_unit import IMAGES, PER_UNIT, Around, Unit
from lockstep.lower.program import Block, DeviceLowering, Load, fill_weights
from lockstep.models.block import BlockModel, blocks
from lockstep.models.resnet import Residual, ResNet

_Shape = tuple[int, int, int]


@dataclass(frozen=True)
class ResidualProgram:
    """A model as units and a classifier, and the slot of each parameter and statistic in the layout.

    `firsts` are the units that blocks begin with. Only the last part has the classifier.
    """

    units: tuple[Unit, ...]
    head: Layer | None
    params: tuple[int, ...]
    statistics: tuple[int, ...]
    blocks: tuple[Block, ...]
    firsts: tuple[int, ...]
    around: Around = field(default_factory=Around)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers of all units, then the classifier."""
        return (*(unit.layer for unit in self.units), *([self.head] if self.head else []))

    def part(self, own: range) -> ResidualProgram:
        """Some of the blocks; what the first of them reads is the input of the part."""
        ends = *self.firsts, len(self.units)
        first, stop = ends[own.start], ends[own.stop]
        is_last = stop == len(self.units)
        slots = range(PER_UNIT * first, len(self.params + self.statistics) if is_last else PER_UNIT * stop)

        def keep(kind: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(slot - slots.start for slot in kind if slot in slots)

        return ResidualProgram(
            tuple(unit.counted_from(first) for unit in self.units[first:stop]),
            self.head if is_last else None,
            keep(self.params),
            keep(self.statistics),
            self.blocks[own.start : own.stop],
            tuple(number - first for number in self.firsts[own.start : own.stop]),
            Around(self.units[first - 1] if first else None, None if is_last else self.units[stop]),
        )

    @property
    def drops(self) -> tuple[str, ...]:
        return ()

    @property
    def kernels(self) -> str:
        return "fused"

    @property
    def shares_norms(self) -> bool:
        return True

    def make_eval(self, lowering: DeviceLowering, lanes: int) -> tuple[EvalNetwork, Load]:
        """A network whose batch norms are a fixed factor and shift of each convolution."""
        train, device, table = lowering.train, lowering.device, lowering.table
        network = ResidualEval(self.units, self.head, lanes, train, device, table)

        def load(model: nn.Module) -> None:
            fill_weights(self, network, model)
            network.fold()

        return network, load

    def facts(self, table: Table, precision: str) -> dict[str, str]:
        return {"tiles": table.digest(self.layers, precision)}

    def uncompiled(self) -> ResidualProgram:
        return self

    @property
    def make(self) -> Make:
        if self.around == Around():
            return partial(ResidualNetwork, self.units, self.head)
        return partial(ResidualPart, self.units, self.head, self.around)

    def to_flat(self, layout: Layout, tensors: Sequence[Tensor], flat: Tensor) -> None:
        """Copy tensors shaped as the parameters, or as those and the statistics, into a flat table.

        CO CI KH KW → KH KW CO CI.
        """
        for slot, tensor in zip(self._slots(tensors), tensors, strict=True):
            lying = tensor.permute(2, 3, 0, 1) if tensor.dim() == 4 else tensor
            flat[layout.places[slot]].copy_(lying.flatten())

    def from_flat(self, layout: Layout, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy a flat table into tensors shaped as the parameters, or as those and the statistics."""
        for slot, tensor in zip(self._slots(tensors), tensors, strict=True):
            lying = tensor.permute(2, 3, 0, 1) if tensor.dim() == 4 else tensor
            lying.copy_(flat[layout.places[slot]].view(lying.shape))

    def _slots(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """The slots of the parameters, or of the parameters and the statistics."""
        return self.params if len(tensors) == len(self.params) else (*self.params, *self.statistics)


class _Unfit(Exception):
    """The model is not made of such units."""


_FORWARDS = {
    module.forward
    for module in (
        BlockModel, Residual, GlobalAverage, nn.Sequential, nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.Identity,
        nn.Linear,
    )
}  # fmt: skip


def find_residual(model: nn.Module, shape: _Shape) -> ResidualProgram | None:
    """The units of one of our residual networks, or None; `shape` is an image's C, H, W."""
    is_plain = all(
        is_untouched(module) and getattr(type(module), "forward", None) in _FORWARDS
        for module in model.modules()
    )
    if not (isinstance(model, ResNet) and is_plain and all(p.requires_grad for p in model.parameters())):
        return None
    (_, stem), *middle, (_, classifier) = blocks(model)
    builder, firsts = _Builder(), [0]
    try:
        last = builder.add_chain(stem, IMAGES, shape)
        for _, block in middle:
            firsts.append(last + 1)
            last = builder.add_block(block, last)
        return builder.finish(model, classifier, firsts)
    except _Unfit:
        return None


@dataclass
class _Builder:
    units: list[Unit] = field(default_factory=list)
    slots: dict[int, int] = field(default_factory=dict)  # of parameters and buffers, by their id

    def add_chain(self, chain: nn.Module, source: int, image: _Shape) -> int:
        """Add units of convolution, norm and optional ReLU; return the number of the last one."""
        conv, first = None, len(self.units)
        for part in chain if isinstance(chain, nn.Sequential) else ():
            if isinstance(part, nn.Conv2d) and conv is None and _is_plain(part):
                conv = part
            elif isinstance(part, nn.BatchNorm2d) and conv is not None and _is_usual(part):
                source, conv = self._add_unit(conv, part, source, image), None
                image = self._image(source)
            elif isinstance(part, nn.ReLU) and conv is None and len(self.units) > first:
                self.units[-1] = replace(self.units[-1], relu=True)
            else:
                raise _Unfit
        if conv is not None or len(self.units) == first:
            raise _Unfit
        return source

    def add_block(self, block: nn.Module, source: int) -> int:
        """Add a block's units, a projection before the last of them; return the number of the last one.

        A projection and the first unit of its block read the same input. The backward pass runs in reverse,
        so the first unit adds its data gradient last. Its kernel visits all pixels, unlike that of a strided
        projection, so it can complete the sum and also compute the sums for the gradient of the norm before.
        """
        if not isinstance(block, Residual) or not isinstance(block.main, nn.Sequential):
            raise _Unfit
        image, added = self._image(source), source
        cut = max((n for n, part in enumerate(block.main) if isinstance(part, nn.Conv2d)), default=0)
        inner = self.add_chain(block.main[:cut], source, image) if cut else source
        if not isinstance(block.shortcut, nn.Identity):
            added = self.add_chain(block.shortcut, source, image)
        last = self.add_chain(block.main[cut:], inner, self._image(inner))
        same = self._image(added) == self._image(last)
        if not same or self.units[last].relu or (added != source and self.units[added].relu):
            raise _Unfit
        self.units[last] = replace(self.units[last], residual=added, relu=True)
        return last

    def finish(self, model: nn.Module, classifier: nn.Module, firsts: Sequence[int]) -> ResidualProgram:
        """The program, if it ends with the known classifier, in a block with what that reads."""
        parts = list(classifier.children())
        if list(map(type, parts)) != [GlobalAverage, nn.Linear]:
            raise _Unfit
        linear = parts[1]
        assert isinstance(linear, nn.Linear)
        self._give_slots([linear.weight, linear.bias])
        tensors = [*model.parameters()], [b for b in model.buffers() if b.is_floating_point()]
        if {id(tensor) for kind in tensors for tensor in kind} != self.slots.keys():
            raise _Unfit
        named = {self.slots[id(p)]: name for name, p in model.named_parameters()}
        names = [named[PER_UNIT * i].removesuffix(".weight") for i in range(len(self.units) + 1)]
        units = tuple(map(Unit.called, self.units, names))
        head = Layer(1, 1, linear.in_features, linear.out_features, relu=False, name=names[-1])
        params, statistics = (tuple(self.slots[id(tensor)] for tensor in kind) for kind in tensors)
        *others, before, end = (f"blocks.{name}" for name, _ in blocks(model))
        pieces = *(Block((name,)) for name in others), Block((before, end))
        return ResidualProgram(units, head, params, statistics, pieces, tuple(firsts))

    def _add_unit(self, conv: nn.Conv2d, norm: nn.BatchNorm2d, source: int, image: _Shape) -> int:
        (kh, kw), pad = conv.kernel_size, conv.padding
        assert not isinstance(pad, str) and norm.momentum is not None
        layer = Layer(
            image[1], image[2], image[0], conv.out_channels, (kh, kw), (pad[0], pad[1]),
            relu=False, stride=conv.stride[0], bias=False,
        )  # fmt: skip
        self._give_slots([conv.weight, norm.weight, norm.bias, norm.running_mean, norm.running_var])
        self.units.append(Unit(layer, source, None, False, norm.eps, norm.momentum))
        return len(self.units) - 1

    def _give_slots(self, tensors: Sequence[Tensor | None]) -> None:
        first = len(self.slots)
        self.slots |= {id(tensor): first + n for n, tensor in enumerate(tensors)}
        if len(self.slots) != first + len(tensors):  # a tensor is used twice
            raise _Unfit

    def _image(self, number: int) -> _Shape:
        layer = self.units[number].layer
        return layer.out_channels, *layer.out_size


def _is_plain(conv: nn.Conv2d) -> bool:
    same = conv.stride[0] == conv.stride[1] and conv.dilation == (1, 1) and conv.padding_mode == "zeros"
    return same and conv.groups == 1 and conv.bias is None and not isinstance(conv.padding, str)


def _is_usual(norm: nn.BatchNorm2d) -> bool:
    return bool(norm.affine and norm.track_running_stats and norm.momentum is not None)
