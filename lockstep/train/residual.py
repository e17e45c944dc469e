"""A residual network as fused kernels see it: units in order, and how their tensors lie in flat tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor, nn

from lockstep.kernels.device.flat import Layout, Make
from lockstep.kernels.device.layer import Layer
from lockstep.kernels.device.residual import IMAGES, PER_UNIT, ResidualNetwork, Unit
from lockstep.models.block import GlobalAverage, blocks
from lockstep.models.resnet import Residual, ResNet

_Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Residuals:
    """A model as units and a classifier; which slot of the layout each parameter and buffer has."""

    units: tuple[Unit, ...]
    head: Layer
    params: tuple[int, ...]
    statistics: tuple[int, ...]
    drops: tuple[str, ...] = ()

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Of all units and the classifier."""
        return (*(unit.layer for unit in self.units), self.head)

    @property
    def make(self) -> Make:
        """Makes buffers and kernels for a number of lanes."""
        return partial(ResidualNetwork, self.units, self.head)

    def to_flat(self, layout: Layout, tensors: Sequence[Tensor], flat: Tensor) -> None:
        """Copy tensors shaped as the parameters, or as those and the statistics, into a flat table.

        CO CI KH KW → KH KW CO CI.
        """
        for slot, tensor in zip((*self.params, *self.statistics), tensors, strict=False):
            lying = tensor.permute(2, 3, 0, 1) if tensor.dim() == 4 else tensor
            flat[layout.places[slot]].copy_(lying.flatten())

    def from_flat(self, layout: Layout, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy a flat table into tensors shaped as the parameters, or as those and the statistics."""
        for slot, tensor in zip((*self.params, *self.statistics), tensors, strict=False):
            lying = tensor.permute(2, 3, 0, 1) if tensor.dim() == 4 else tensor
            lying.copy_(flat[layout.places[slot]].view(lying.shape))


def find_residual(model: nn.Module, shape: _Shape) -> Residuals | None:
    """The units of one of our residual networks, or None; `shape` is an image's C, H, W."""
    if not isinstance(model, ResNet):
        return None
    (_, stem), *middle, (_, classifier) = blocks(model)
    builder = _Builder()
    last = builder.add_chain(stem, IMAGES, shape)
    for _, block in middle:
        assert isinstance(block, Residual)
        last = builder.add_block(block, last) if last is not None else None
    if last is None or not isinstance(classifier, nn.Sequential):
        return None
    average, linear = classifier
    if not (isinstance(average, GlobalAverage) and isinstance(linear, nn.Linear) and linear.bias is not None):
        return None
    head = Layer(1, 1, linear.in_features, linear.out_features, relu=False)
    return builder.finish(model, head, linear)


@dataclass
class _Builder:
    units: list[Unit] = field(default_factory=list)
    slots: dict[int, int] = field(default_factory=dict)  # of parameters and buffers, by their id

    def add_chain(self, chain: nn.Module, source: int, image: _Shape) -> int | None:
        """Units of convolution, norm and perhaps ReLU; the number of the last one."""
        parts = list(chain) if isinstance(chain, nn.Sequential) else []
        last = None
        for part in parts:
            if isinstance(part, nn.Conv2d) and _is_plain(part):
                conv = part
            elif isinstance(part, nn.BatchNorm2d) and _is_usual(part):
                last = self._add_unit(conv, part, source, image)
                source, image = last, self._image(last)
            elif isinstance(part, nn.ReLU) and last is not None:
                self.units[last] = replace(self.units[last], relu=True)
            else:
                return None
        return last

    def add_block(self, block: Residual, source: int) -> int | None:
        """A block's projection, if it has one, and its units; the number of the last one."""
        image = self._image(source)
        added = source if isinstance(block.shortcut, nn.Identity) else None
        if added is None:
            added = self.add_chain(block.shortcut, source, image)
        last = self.add_chain(block.main, source, image)
        if last is None or added is None:
            return None
        self.units[last] = replace(self.units[last], residual=added, relu=True)
        return last

    def finish(self, model: nn.Module, head: Layer, linear: nn.Linear) -> Residuals:
        first = PER_UNIT * len(self.units)
        self.slots |= {id(linear.weight): first, id(linear.bias): first + 1}
        params = tuple(self.slots[id(p)] for p in model.parameters())
        statistics = tuple(self.slots[id(b)] for b in model.buffers() if b.is_floating_point())
        return Residuals(tuple(self.units), head, params, statistics)

    def _add_unit(self, conv: nn.Conv2d, norm: nn.BatchNorm2d, source: int, image: _Shape) -> int:
        (kh, kw), pad = conv.kernel_size, conv.padding
        assert not isinstance(pad, str) and norm.momentum is not None
        layer = Layer(
            image[1], image[2], image[0], conv.out_channels, (kh, kw), (pad[0], pad[1]),
            relu=False, stride=conv.stride[0], bias=False,
        )  # fmt: skip
        first = PER_UNIT * len(self.units)
        tensors = (conv.weight, norm.weight, norm.bias, norm.running_mean, norm.running_var)
        self.slots |= {id(tensor): first + n for n, tensor in enumerate(tensors)}
        self.units.append(Unit(layer, source, None, False, norm.eps, norm.momentum))
        return len(self.units) - 1

    def _image(self, number: int) -> _Shape:
        layer = self.units[number].layer
        return layer.out_channels, *layer.out_size


def _is_plain(conv: nn.Conv2d) -> bool:
    same = conv.stride[0] == conv.stride[1] and conv.dilation == (1, 1)
    return same and conv.groups == 1 and conv.bias is None and not isinstance(conv.padding, str)


def _is_usual(norm: nn.BatchNorm2d) -> bool:
    return bool(norm.affine and norm.track_running_stats and norm.momentum is not None)
