"""A model for stock kernels on the device: which it can be, and how its tensors lie in flat tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from lockstep.errors import ModelError
from lockstep.kernels.average import GlobalAverage
from lockstep.kernels.device.flat import Layout, Make
from lockstep.kernels.device.stock import Model, StockNetwork, as_lying
from lockstep.kernels.lrn import LRN
from lockstep.models.block import BlockModel
from lockstep.models.googlenet import GoogLeNet, Inception
from lockstep.models.resnet import Residual
from lockstep.train.together import is_untouched

# modules that treat every sample by itself and use each of their parts once
_KNOWN = {
    module.forward
    for module in (
        BlockModel, GlobalAverage, GoogLeNet, Inception, Residual, LRN, nn.Sequential, nn.Conv2d,
        nn.BatchNorm2d, nn.Linear, nn.Dropout, nn.ReLU, nn.Sigmoid, nn.Tanh, nn.MaxPool2d, nn.AvgPool2d,
        nn.Flatten, nn.Identity, nn.ModuleDict,
    )
}  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    """A model whose lanes torch compiles."""

    model: Model
    drops: tuple[str, ...]

    @property
    def make(self) -> Make:
        """Makes buffers and kernels for a number of lanes."""
        return partial(StockNetwork, self.model)

    def to_flat(self, layout: Layout, tensors: Sequence[Tensor], flat: Tensor) -> None:
        """Copy tensors shaped as the parameters, or as those and the statistics, into a flat table."""
        for place, tensor in zip(layout.places, tensors, strict=False):
            as_lying(flat[place], tensor.shape).copy_(tensor)

    def from_flat(self, layout: Layout, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy a flat table into tensors shaped as the parameters, or as those and the statistics."""
        for place, tensor in zip(layout.places, tensors, strict=False):
            tensor.copy_(as_lying(flat[place], tensor.shape))


def is_known(model: nn.Module) -> bool:
    """Whether a model is made of modules that are known to compute every sample by itself."""
    modules = [module for _, module in model.named_modules(remove_duplicate=False)]
    used = sum(len(list(module.parameters(recurse=False))) for module in modules)
    once = used == len(list(model.parameters()))
    return once and all(is_untouched(module) and type(module).forward in _KNOWN for module in modules)


def find_compiled(model: nn.Module, image: tuple[int, int, int]) -> Compiled:
    """The model for stock kernels on the device; what it has must be known to the step there."""
    if not all(p.requires_grad for p in model.parameters()):
        raise ModelError("a parameter of the model is frozen")
    norms = [module for module in model.modules() if type(module) is nn.BatchNorm2d]
    if not all(norm.affine and norm.track_running_stats and norm.momentum is not None for norm in norms):
        raise ModelError("a batch norm without parameters, running statistics or momentum")
    if len(list(model.buffers())) != 3 * len(norms):
        raise ModelError("the model has buffers that are no running statistics of nn.BatchNorm2d")
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and type(module) is not nn.Dropout:
            raise ModelError(f"'{name}' is no nn.Dropout")
        if type(module) is nn.Conv2d and (module.padding_mode != "zeros" or isinstance(module.padding, str)):
            raise ModelError(f"the padding of '{name}' is not by numbers and zeros")
    drops = tuple(name for name, module in model.named_modules() if type(module) is nn.Dropout)
    return Compiled(Model(model, image, is_known(model)), drops)
