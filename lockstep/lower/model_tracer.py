"""Finds the calls of a model's forward pass by torch.fx; a module that it cannot look into stays one call."""

from __future__ import annotations

import inspect
import random
from typing import Any

import torch
from torch import fx, nn

from lockstep.errors import ModelError

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ModelTracer(fx.Tracer):
    """Looks into modules as deep as it can, down to those of torch.nn and our own kernels."""

    failure = "cannot be cut into stages"
    subject = ""  # what an error names; empty: the model's class
    proxy_buffer_attributes = True  # else what a forward does to a buffer would be done once, now

    def __init__(self) -> None:
        super().__init__()
        self._opaque: set[nn.Module] = set()

    def find_calls(self, model: nn.Module) -> fx.Graph:
        """The calls of a forward pass in the model's present mode; only its first argument is given."""
        what = f"{self.subject or type(model).__name__} {self.failure}"
        if any(getattr(model, hooks) for hooks in _HOOKS):
            raise ModelError(
                f"{what}: it has hooks, which see the whole model: put them on a module inside it"
            )
        others = list(inspect.signature(model.forward).parameters.values())[1:]
        fixed = {p.name: p.default for p in others if p.default is not p.empty}
        before = _side_effects(model)
        try:
            graph = self.trace(model, concrete_args=fixed or None)
        except ModelError:
            raise
        except Exception as error:  # whatever the user's code raises when it gets a stand-in for a tensor
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ModelError(
                f"{what}: its forward does more than call modules "
                f"and functions on tensors ({reason}): make it an nn.Sequential, or put what depends on "
                "values into a module of its own"
            ) from None
        if _side_effects(model) != before:
            raise ModelError(
                f"{what}: its forward draws random numbers or "
                "changes tensors in a way that decides what is computed: put this into a module of its own"
            )
        return graph

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is one call."""
        if m in self._opaque or "forward" in vars(m) or any(getattr(m, hooks) for hooks in _HOOKS):
            return True
        own = type(m).__module__.startswith("lockstep.kernels")
        return own or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Look into a module; if that fails, draws random numbers or changes a tensor, it is one call."""
        name = self.path_of_module(m)
        if not self.is_leaf_module(m, name):
            count, stack, before = len(self.graph.nodes), self.module_stack.copy(), _side_effects(m)
            try:
                found = super().call_module(m, forward, args, kwargs)
                if _side_effects(m) == before:
                    return found
            except Exception:  # whatever the module raises when it gets a stand-in for a tensor
                self.module_stack = stack
            for node in reversed(list(self.graph.nodes)[count:]):
                self.graph.erase_node(node)
            self._opaque.add(m)
        return super().call_module(m, forward, args, kwargs)


def _side_effects(module: nn.Module) -> tuple[object, ...]:
    """What differs if a forward pass with stand-ins has done something real."""
    versions = [tensor._version for tensor in (*module.parameters(), *module.buffers())]
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), versions
