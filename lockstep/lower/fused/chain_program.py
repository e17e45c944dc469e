"""The program of a fused chain: finds the fused layers of a model, and maps its tensors to flat tables.

`chain_network` executes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn

from lockstep.kernels.triton.conv.fused_layer import Layer
from lockstep.kernels.triton.conv.tile_table import Table
from lockstep.lower.batched import chain_of
from lockstep.lower.eval_network import EvalNetwork
from lockstep.lower.flat_table import Layout, Make
from lockstep.lower.fused.chain_network import ChainNetwork
from lockstep.lower.program import Block, DeviceLowering, Load, fill_weights

_Shape = tuple[int, int, int]


@dataclass(frozen=True)
class ChainProgram:
    """A model as fused layers; `seen` is the image (C, H, W) that a fully connected layer flattens.

    Of a part, `before` is the layer whose output it reads; only the last part `gives_logits`.
    """

    layers: tuple[Layer, ...]
    modules: tuple[nn.Conv2d | nn.Linear, ...]
    names: tuple[str, ...]  # of the modules
    drops: tuple[str, ...]  # the name of each layer's dropout
    seen: tuple[_Shape | None, ...]
    before: Layer | None = None
    gives_logits: bool = True

    def to_flat(self, layout: Layout, tensors: Sequence[Tensor], flat: Tensor) -> None:
        """Copy tensors shaped as the parameters (weight, bias, weight, …) into a flat table."""
        for i, (weight, bias) in enumerate(_pairs(layout)):
            flat[weight].copy_(self._to_kernel(i, tensors[2 * i]).flatten())
            flat[bias].copy_(tensors[2 * i + 1])

    @property
    def kernels(self) -> str:
        return "fused"

    @property
    def shares_norms(self) -> bool:
        """It has no batch norm."""
        return False

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Every layer is one."""
        return tuple(Block((name,)) for name in self.names)

    def part(self, own: range) -> ChainProgram:
        """Some of the layers."""
        part = slice(own.start, own.stop)
        return ChainProgram(
            self.layers[part],
            self.modules[part],
            self.names[part],
            self.drops[part],
            self.seen[part],
            self.layers[own.start - 1] if own.start else None,
            own.stop == len(self.layers),
        )

    @property
    def make(self) -> Make:
        """Makes the network for a number of lanes."""
        return partial(ChainNetwork, self.layers, before=self.before, gives_logits=self.gives_logits)

    def make_eval(self, lowering: DeviceLowering, lanes: int) -> tuple[EvalNetwork, Load]:
        """The training network, which is evaluated with dropout off."""
        network = lowering.network(lanes)
        assert isinstance(network, ChainNetwork)
        return network, partial(fill_weights, self, network)

    def facts(self, table: Table, precision: str) -> dict[str, str]:
        return {"tiles": table.digest(self.layers, precision)}

    def uncompiled(self) -> ChainProgram:
        return self

    def from_flat(self, layout: Layout, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy a flat table into tensors shaped as the parameters."""
        for i, (weight, bias) in enumerate(_pairs(layout)):
            tensors[2 * i].copy_(self._from_kernel(i, flat[weight]))
            tensors[2 * i + 1].copy_(flat[bias])

    def _to_kernel(self, i: int, weight: Tensor) -> Tensor:
        """CO CI KH KW → KH KW CO CI; the columns of a flattened image C H W → H W C."""
        if weight.dim() == 4:
            return weight.permute(2, 3, 0, 1)
        seen = self.seen[i]
        return weight.view(-1, *seen).permute(0, 2, 3, 1).flatten(1) if seen else weight

    def _from_kernel(self, i: int, weight: Tensor) -> Tensor:
        layer, seen = self.layers[i], self.seen[i]
        if isinstance(self.modules[i], nn.Conv2d):
            return weight.view(*layer.kernel, layer.out_channels, layer.in_channels).permute(2, 3, 0, 1)
        if seen:
            channels, height, width = seen
            return weight.view(-1, height, width, channels).permute(0, 3, 1, 2).flatten(1)
        return weight.view(layer.out_channels, layer.in_channels)


def _pairs(layout: Layout) -> list[tuple[slice, slice]]:
    """The places of each layer's weight and bias."""
    return list(zip(layout.places[::2], layout.places[1::2], strict=True))


def find_chain(model: nn.Module, shape: _Shape) -> ChainProgram | None:
    """The fused layers of a model, or None if it is not a chain of them; `shape` is an image's C, H, W."""
    parts = chain_of(model, with_dropout=True)
    if parts is None:
        return None
    names = {id(module): name for name, module in model.named_modules()}
    layers: list[Layer] = []
    modules: list[nn.Conv2d | nn.Linear] = []
    drops: list[str] = []
    seen: list[_Shape | None] = []
    image: _Shape | None = shape  # the input of the next layer, while it is an image
    flat = False
    for part in parts:
        if isinstance(part, nn.Conv2d) and image and not flat and _is_plain(part):
            layers.append(replace(_conv(part, image), name=names[id(part)]))
            seen.append(None)
        elif isinstance(part, nn.Linear) and part.bias is not None and (flat or image is None):
            name = names[id(part)]
            layers.append(Layer(1, 1, part.in_features, part.out_features, relu=False, name=name))
            seen.append(image)
            image = None
        elif isinstance(part, nn.Flatten) and (part.start_dim, part.end_dim) == (1, -1):
            flat = True
            continue
        elif not layers or not (changed := _extend(layers[-1], part)):
            return None
        else:
            layers[-1] = changed
            drops[-1] = names[id(part)] if isinstance(part, nn.Dropout) else drops[-1]
            image = _image(changed) if image else None
            continue
        modules.append(part)
        drops.append("")
        image = _image(layers[-1]) if isinstance(part, nn.Conv2d) else None
    last = layers[-1] if layers else None
    if last is None or last.height * last.width > 1 or last.relu or last.dropout or image:
        return None
    pairs = [id(p) for module in modules for p in (module.weight, module.bias)]
    if pairs != [id(p) for p in model.parameters()]:  # if a module registered its bias first
        return None
    return ChainProgram(
        tuple(layers), tuple(modules), tuple(names[id(m)] for m in modules), tuple(drops), tuple(seen)
    )


def _is_plain(conv: nn.Conv2d) -> bool:
    simple = conv.stride == conv.dilation == (1, 1) and conv.groups == 1 and conv.bias is not None
    pad, kernel = conv.padding, conv.kernel_size
    return simple and not isinstance(pad, str) and pad[0] < kernel[0] and pad[1] < kernel[1]


def _conv(conv: nn.Conv2d, image: _Shape) -> Layer:
    kernel, pad = conv.kernel_size, conv.padding
    assert not isinstance(pad, str)
    return Layer(
        image[1], image[2], image[0], conv.out_channels, (kernel[0], kernel[1]), (pad[0], pad[1]), relu=False
    )


def _image(layer: Layer) -> _Shape:
    return layer.out_channels, *layer.out_size


def _extend(layer: Layer, part: nn.Module) -> Layer | None:
    """A layer fused with the module after it; None if the kernels cannot fuse the two."""
    done, is_flat = layer.pool > 1 or layer.dropout, layer.height * layer.width == 1
    if isinstance(part, nn.Identity):
        return layer
    if isinstance(part, nn.ReLU) and not done:
        return replace(layer, relu=True)
    if isinstance(part, nn.MaxPool2d) and not done and min(layer.conv_size) > 1:
        sizes = [part.kernel_size, part.stride]
        is_half = all(size in (2, (2, 2)) for size in sizes) and part.padding in (0, (0, 0))
        return replace(layer, pool=2) if is_half and not part.ceil_mode and part.dilation == 1 else None
    if isinstance(part, nn.Dropout) and part.p < 1 and not done and layer.relu and is_flat:
        return replace(layer, dropout=part.p)
    return None
