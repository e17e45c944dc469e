"""Compiled model, a check: whether any call could give a lane other bits beside other lanes than by itself.

A call may compute every value by itself, move values, take windows of an image, or be an operation of ours.
Everything else that torch would run for it, forward or backward, is refused by the name of the module: sums,
products and norms, whose order torch chooses by the size of a batch. `network_probe` then compares bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.errors import ModelError
from lockstep.kernels.structure import leaves, map_tensors
from lockstep.kernels.triton.conv.tile import KERNEL_TYPES
from lockstep.lower.compiled.compiled_block import ModelBlock, chains_of, own_name
from lockstep.lower.compiled.compiled_layer import LaneDropout, Sizes, by_lane
from lockstep.lower.compiled.conv_probe import describe_conv
from lockstep.lower.compiled.lane_graph import trace_lanes
from lockstep.spec import Train

# Operations that move values, make constants, take a window of each image by itself, or are pointwise though
# torch does not say so.
_MOVES = {
    "_reshape_copy", "_to_copy", "_unsafe_view", "arange", "avg_pool2d", "avg_pool2d_backward", "cat",
    "celu_backward", "clone", "constant_pad_nd", "copy_", "detach", "elu_backward", "empty", "empty_like",
    "empty_strided", "fill_", "flip", "full", "full_like", "gelu_", "gelu_backward", "glu", "glu_backward",
    "hardshrink_backward", "hardsigmoid_backward", "hardswish", "hardswish_", "hardswish_backward",
    "hardtanh_backward", "leaky_relu_backward", "lift_fresh", "log_sigmoid_backward", "log_sigmoid_forward",
    "max_pool2d_with_indices", "max_pool2d_with_indices_backward", "mish_", "mish_backward", "new_empty",
    "new_empty_strided", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "pixel_shuffle",
    "pixel_unshuffle", "reflection_pad2d", "relu6_", "roll", "rsub", "scalar_tensor", "select_backward",
    "silu_backward", "slice_backward", "slice_scatter", "softplus_backward", "split_with_sizes", "squeeze_",
    "stack", "t_", "threshold_", "threshold_backward", "transpose_", "unsqueeze_", "zero_", "zeros",
    "zeros_like",
}  # fmt: skip


_SAMPLES = 2  # of the lane that is looked at, on `meta`: nothing is computed


def check_call_sums(
    model: nn.Module, image: tuple[int, int, int], train: Train, blocks: Sequence[ModelBlock]
) -> tuple[str, ...]:
    """The names of a model's dropout layers, once no call of it could mix lanes; the model is used up."""
    device, dtype = torch.device("meta"), KERNEL_TYPES[train.precision][0]
    sizes = Sizes(_SAMPLES, train.lanes, 1, dtype)
    convs = {
        name: describe_conv(layer, train, dtype)._replace(lane_size=_SAMPLES)
        for name, layer in model.named_modules()
        if type(layer) is nn.Conv2d
    }
    lowered = by_lane(model.to(device), sizes, convs, device)
    drops = [name for name, layer in lowered.named_modules() if isinstance(layer, LaneDropout)]
    x = torch.empty(_SAMPLES, *image, dtype=dtype, device=device)
    for block in blocks:
        for part in chains_of(lowered, block):
            graph = trace_lanes(part, sizes)
            if train.lanes > 1:
                check = CallCheck(graph)
                found = check.run(x)
                if check.refusal:
                    raise ModelError(check.refusal)
                x = x if part.is_head else found
    return tuple(drops)


class CallCheck(fx.Interpreter):
    """Runs a traced module call by call, each with its own backward pass, and looks at what torch runs."""

    def __init__(self, graph: nn.Module) -> None:
        super().__init__(graph)
        self.refusal = ""

    def run_node(self, n: fx.Node) -> Any:
        if n.op not in ("call_module", "call_function", "call_method"):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        with _Watch() as watch:
            given = [tensor for tensor in leaves([args, kwargs]) if tensor.requires_grad]
            found = self._call(n, *map_tensors(_as_inner, [args, kwargs]))
            ends = [tensor for tensor in leaves(found) if tensor.requires_grad]
            if ends:
                owner = self.module.get_submodule(str(n.target)) if n.op == "call_module" else nn.Module()
                sources = [*given, *(p for p in owner.parameters() if p.requires_grad)]
                torch.autograd.grad(ends, sources, [torch.ones_like(end) for end in ends], allow_unused=True)
        if watch.found and not self.refusal:  # fx would write its own text into an error that is raised here
            self.refusal = f"it does not know how {_label(n)} sums or draws values "
            self.refusal += (
                f"({', '.join(sorted(watch.found))}), whose bits may depend on how many lanes it gets"
            )
        return map_tensors(_cut, found)

    def _call(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        return getattr(self, n.op)(n.target, tuple(args), dict(kwargs))


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations that are not known to be the same for any number of lanes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket.__name__)
        known = func.namespace == "lockstep" or torch.Tag.pointwise in func.tags or name in _MOVES
        if torch.Tag.nondeterministic_seeded in func.tags or not (known or func.is_view):
            self.found.add(name)
        return func(*args, **(kwargs or {}))


def _cut(tensor: Tensor) -> Tensor:
    """The tensor without what came before it."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _as_inner(tensor: Tensor) -> Tensor:
    """A copy that may be changed in place, as no parameter may."""
    return tensor.clone() if tensor.requires_grad else tensor


def _label(node: fx.Node) -> str:
    """The module that makes a call, for people."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    if not stack:
        return f"'{own_name(str(node.target))}'"
    path, kind = stack[-1]
    return f"'{own_name(path)}' ({getattr(kind, '__name__', kind)})"
