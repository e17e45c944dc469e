"""The fixed rule for each kind of layer: how its rows and channels are dealt out, by type and shape alone.

A layer's rows are in bands if it has at least four output rows a band. What has no rule here is computed
whole by every worker: exact, but not faster.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Size, fx, nn

from lockstep.errors import ModelError
from lockstep.kernels.global_average import GlobalAverage
from lockstep.kernels.lrn import LRN
from lockstep.parallel.split.layers.conv_piece import ConvForm

LEAST_ROWS = 4  # a band
_VECTOR = 64  # elements: a multiple of every CPU's vectors, so that no element is computed as a rest

# Each element by itself, by operations that round once: the same bits wherever it is.
_EXACT_LAYERS = (nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.LeakyReLU, nn.Identity, nn.Dropout, nn.Dropout2d)
_EXACT_CALLS = {
    *(F.relu, F.relu6, F.leaky_relu, F.hardtanh, torch.relu, torch.relu_, torch.neg, torch.abs),
    *(torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum, torch.clamp),
    *(operator.add, operator.sub, operator.mul, operator.neg, operator.iadd, operator.imul),
    *("relu", "relu_", "add", "add_", "sub", "mul", "mul_", "neg", "clamp", "contiguous", "clone"),
}
# Each element by itself, by functions that a CPU may compute otherwise at the end of a tensor.
_SMOOTH_LAYERS = (
    nn.Sigmoid,
    nn.SiLU,
    nn.GELU,
    nn.Tanh,
    nn.ELU,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.Mish,
    nn.Softplus,
)


def is_banded(shape: Size | None, bands: int) -> bool:
    """Whether the rows of a value are in bands."""
    return bands > 1 and shape is not None and len(shape) == 4 and shape[2] >= LEAST_ROWS * bands


def is_exact(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether each element of the result is computed by itself, exactly rounded."""
    return type(module) in _EXACT_LAYERS if module else node.target in _EXACT_CALLS


def is_smooth(module: nn.Module | None) -> bool:
    """Whether each element is computed by itself, by a function that may depend on its place."""
    return type(module) in _SMOOTH_LAYERS


def is_lrn(module: nn.Module | None) -> bool:
    """Whether each pixel is computed by itself, from all channels."""
    return type(module) is LRN


def keeps_vectors(count: int) -> bool:
    """Whether so many elements leave no rest."""
    return count % _VECTOR == 0


def form_of_convolution(module: nn.Module | None) -> ConvForm | None:
    """The numbers of a convolution that can be cut."""
    if type(module) not in (nn.Conv2d, nn.ConvTranspose2d):
        return None
    try:
        return ConvForm.of(module)  # type: ignore[arg-type]
    except ModelError:
        return None


def is_flatten(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether [N, C, H, W] becomes [N, C·H·W]."""
    if module:
        return isinstance(module, nn.Flatten) and [module.start_dim, module.end_dim] == [1, -1]
    args = [*node.args[1:], *node.kwargs.values()]
    return node.target in (torch.flatten, "flatten") and args == [1]


def is_shape_query(node: fx.Node) -> bool:
    """Whether a call asks for a tensor's shape."""
    asks = node.target is getattr and node.args[1:2] in (("shape",), ("ndim",), ("device",), ("dtype",))
    return bool(asks) or node.target in ("size", "dim", "numel")


def is_concatenation(node: fx.Node) -> bool:
    """Whether channels of several values come one after another."""
    dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
    return node.target in (torch.cat, torch.concat) and bool(dim == 1)


def mean_dims(node: fx.Node, module: nn.Module | None) -> bool | None:
    """Whether a mean over all pixels keeps dimensions for them; None for another call."""
    if type(module) is GlobalAverage:
        return False
    if type(module) is nn.AdaptiveAvgPool2d:
        return True if module.output_size in (1, (1, 1)) else None
    if node.target in (F.adaptive_avg_pool2d,):
        return True if node.args[1] in (1, (1, 1)) else None
    if node.target in (torch.mean, "mean"):
        given: dict[str, Any] = {**dict(zip(("dim", "keepdim"), node.args[1:], strict=False)), **node.kwargs}
        dims, keeps = given.get("dim"), given.get("keepdim") is True
        return keeps if isinstance(dims, list | tuple) and sorted(d % 4 for d in dims) == [2, 3] else None
    return None
