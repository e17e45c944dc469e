"""Compiled model, its calls: a module is traced, and functions that sum over samples or pixels are replaced.

`compiled_layer` has replaced torch's layers before. Here come the functions that a module's forward calls
itself: norms, means, and operations that spread one tensor over another. `node_check` proves that nothing is
left whose bits could depend on how many lanes are computed at once.
"""

from __future__ import annotations

import inspect
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from lockstep.errors import ModelError
from lockstep.kernels.stock.lane_function import Conv
from lockstep.lower.compiled.compiled_block import Chain, own_name
from lockstep.lower.compiled.compiled_layer import LaneConv2d, LaneLinear, LaneNorm, Sizes
from lockstep.lower.compiled.lane_rule import (
    PAIRS,
    LaneLayerNorm,
    LaneMean,
    LanePair,
    LaneTransposed,
    is_over_pixels,
)
from lockstep.lower.model_tracer import ModelTracer

_ACTS: dict[Any, str] = {
    nn.ReLU: "relu", F.relu: "relu", torch.relu: "relu", torch.relu_: "relu", "relu": "relu", "relu_": "relu",
    nn.SiLU: "silu", F.silu: "silu", nn.Hardswish: "hardswish", F.hardswish: "hardswish",
}  # fmt: skip
Told = Mapping[str, Any]  # the arguments of a call by name
_QUESTIONS = (getattr, operator.eq)  # which assertions ask


class LaneTracer(ModelTracer):
    """Looks into a model down to the layers that know lanes."""

    failure, subject = "cannot be traced", "the model"

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        own = type(m).__module__.startswith("lockstep.lower")
        return own or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Look into a module; one that cannot be looked into is refused by its name."""
        try:
            return fx.Tracer.call_module(self, m, forward, args, kwargs)
        except ModelError:
            raise
        except Exception as error:  # whatever the module raises when it gets a stand-in for a tensor
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            name = own_name(self.path_of_module(m))
            raise ModelError(f"'{name}' ({type(m).__name__}) cannot be traced: {reason}") from None


def trace_lanes(chain: Chain, sizes: Sizes) -> nn.Module:
    """The chain as a graph of calls that compute several lanes; its layers are those of the chain."""
    graph = LaneTracer().find_calls(chain)
    _Rules(chain, graph, sizes).apply()
    return fx.GraphModule(chain, graph)


class _Rules:
    """Replaces the calls of a graph, one after another."""

    def __init__(self, root: nn.Module, graph: fx.Graph, sizes: Sizes) -> None:
        self.root, self.graph, self.sizes = root, graph, sizes
        self._tensors = dict(root.named_buffers()) | dict(root.named_parameters(remove_duplicate=False))

    def apply(self) -> None:
        for node in list(self.graph.nodes):
            if not self._drop(node):
                self._replace(node)
        for node in list(self.graph.nodes):
            self._take_act(node)
        for node in reversed(list(self.graph.nodes)):
            if not node.users and (node.op == "get_attr" or node.target in _QUESTIONS):
                self.graph.erase_node(node)
        self._refuse_shared()

    def _drop(self, node: fx.Node) -> bool:
        """Remove what computes nothing: identities, assertions, counts of batches."""
        if _is_off(node) or (node.op == "call_module" and type(self._module(node)) is nn.Identity):
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        elif not (node.target is torch._assert or (node.target == "add_" and self._is_count(node))):
            return False
        self.graph.erase_node(node)
        return True

    def _is_count(self, node: fx.Node) -> bool:
        tensor = self._tensor(node.args[0])
        return tensor is not None and not tensor.is_floating_point() and tuple(node.args[1:]) == (1,)

    def _replace(self, node: fx.Node) -> None:
        made: nn.Module | None = None
        given: tuple[Any, ...] = node.args[:1]
        if node.op == "call_module":
            made = self._for_module(self._module(node))
        elif node.op in ("call_function", "call_method") and node.target in PAIRS:
            made, given = LanePair(PAIRS[node.target], self.sizes), node.args
        elif node.op in ("call_function", "call_method") and node.target in _RULES:
            rule, form = _RULES[node.target]
            told = _bind(form, node)
            made, given = rule(self, told), (next(iter(told.values())),)
        if made is None:
            return
        path = f"lane_{node.name}"
        self.root.add_module(path, made)
        with self.graph.inserting_before(node):
            options = node.kwargs if isinstance(made, LanePair) else {}
            new = self.graph.call_module(path, given, dict(options))
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)

    def _for_module(self, module: nn.Module) -> nn.Module | None:
        if isinstance(module, nn.LayerNorm) and type(module) is nn.LayerNorm:
            return self._norm_rows(module.weight, module.bias, module.normalized_shape, module.eps)
        if isinstance(module, nn.ConvTranspose2d) and type(module) is nn.ConvTranspose2d:
            return LaneTransposed(module, self.sizes)
        if isinstance(module, nn.AdaptiveAvgPool2d) and module.output_size in (1, (1, 1)):
            return LaneMean(keepdim=True)
        return None

    def _mean(self, told: Told) -> nn.Module | None:
        is_plain = told["dtype"] is None and is_over_pixels(told["dim"])
        return LaneMean(told["keepdim"]) if is_plain else None

    def _adaptive(self, told: Told) -> nn.Module | None:
        return LaneMean(keepdim=True) if told["output_size"] in (1, (1, 1), [1, 1]) else None

    def _layer_norm(self, told: Told) -> nn.Module | None:
        tensors = self._tensor(told["weight"]), self._tensor(told["bias"])
        return self._norm_rows(*tensors, told["normalized_shape"], told["eps"])

    def _norm_rows(
        self, gamma: Tensor | None, beta: Tensor | None, shape: Sequence[int], eps: float
    ) -> nn.Module | None:
        if gamma is None or beta is None or len(shape) != 1:
            return None
        return LaneLayerNorm(gamma, beta, eps, self.sizes)

    def _batch_norm(self, told: Told) -> nn.Module | None:
        names = "weight", "bias", "running_mean", "running_var"
        gamma, beta, mean, var = (self._tensor(told[name]) for name in names)
        if gamma is None or beta is None or mean is None or var is None or told["training"] is not True:
            return None
        return LaneNorm((gamma, beta), (mean, var), (told["eps"], told["momentum"]), self.sizes)

    def _conv(self, told: Told) -> nn.Module | None:
        w = self._tensor(told["weight"])
        if w is None or w.dim() != 4 or isinstance(told["padding"], str):
            return None
        stride, padding, dilation = (
            (n, n) if isinstance(n, int) else (n[0], n[-1])
            for n in (told["stride"], told["padding"], told["dilation"])
        )
        sizes = self.sizes.lane_size, self.sizes.total_lanes
        conv = Conv(stride, padding, dilation, told["groups"], *sizes)
        return LaneConv2d(w, self._tensor(told["bias"]), self.sizes, conv)

    def _linear(self, told: Told) -> nn.Module | None:
        w = self._tensor(told["weight"])
        return None if w is None else LaneLinear(w, self._tensor(told["bias"]), self.sizes)

    def _take_act(self, node: fx.Node) -> None:
        """Let a batch norm apply the activation that alone reads it."""
        norm = self._module(node) if node.op == "call_module" else None
        users = list(node.users)
        if not isinstance(norm, LaneNorm) or len(users) != 1:
            return
        kind = type(self._module(users[0])) if users[0].op == "call_module" else users[0].target
        if (act := _ACTS.get(kind)) and users[0].all_input_nodes == [node]:
            norm.act = act
            users[0].replace_all_uses_with(node)
            self.graph.erase_node(users[0])

    def _refuse_shared(self) -> None:
        """The gradients of a parameter that is used twice would be added before they are summed by lane."""
        used: Counter[int] = Counter()
        for node in self.graph.nodes:
            if node.op == "call_module":
                used.update(id(p) for p in self._module(node).parameters())
            elif node.op == "get_attr" and (tensor := self._tensor(node)) is not None and node.users:
                used.update([id(tensor)] * len(node.users))
        for name, tensor in self.root.named_parameters():
            if used[id(tensor)] > 1 and tensor.requires_grad and self.sizes.total_lanes > 1:
                raise ModelError(f"its parameter '{own_name(name)}' is used twice")

    def _module(self, node: fx.Node) -> nn.Module:
        return self.root.get_submodule(str(node.target))

    def _tensor(self, node: Any) -> Tensor | None:
        """The parameter or buffer that a node reads."""
        is_read = isinstance(node, fx.Node) and node.op == "get_attr"
        return self._tensors.get(str(node.target)) if is_read else None


def _is_off(node: fx.Node) -> bool:
    """Whether it is a dropout that drops nothing."""
    if node.target is not F.dropout:
        return False
    told = _bind(F.dropout, node)
    return told["p"] == 0 or told["training"] is False


def _bind(form: Callable[..., Any], node: fx.Node) -> Told:
    """The arguments of a call by the names of a signature."""
    bound = inspect.signature(form).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return bound.arguments


def _as_mean(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> None: ...
def _as_linear(input: Any, weight: Any, bias: Any = None) -> None: ...
def _as_conv(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: Any = 1,
) -> None: ...  # fmt: skip


# For each function its rule, which gives the module that stands in for a call, and how it is called.
_RULES: dict[Any, tuple[Callable[[_Rules, Told], nn.Module | None], Callable[..., Any]]] = {
    torch.mean: (_Rules._mean, _as_mean),
    "mean": (_Rules._mean, _as_mean),
    F.adaptive_avg_pool2d: (_Rules._adaptive, F.adaptive_avg_pool2d),
    F.layer_norm: (_Rules._layer_norm, F.layer_norm),
    F.batch_norm: (_Rules._batch_norm, F.batch_norm),
    F.conv2d: (_Rules._conv, _as_conv),
    F.linear: (_Rules._linear, _as_linear),
}
