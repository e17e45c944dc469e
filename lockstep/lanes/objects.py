"""What a script sets up: modules with their buffers, optimizers, schedules, other objects with a state."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import ModelError
from lockstep.lanes.state_tree import PackedState, pack_state, restore_state
from lockstep.measure.hidden_state import own_generators
from lockstep.models.tensors import model_tensors


class Objects:
    """Objects in the order in which they were set up, named by their kind: module0, optimizer0, state0."""

    def __init__(self, device: torch.device, caller: str = "session.setup") -> None:
        """`caller` is what errors begin with."""
        self._device, self._caller = device, caller
        self.named: dict[str, Any] = {}

    def add(self, thing: Any) -> None:
        """Take one more object; a module is moved to the device."""
        if any(thing is known for known in self.named.values()):
            raise ModelError(f"{self._caller}: {type(thing).__name__} was set up before")
        kind = _kind(thing, self._caller)
        if isinstance(thing, nn.Module):
            check_module(thing, self._caller)
            for text in own_generators(self._caller, thing):
                warnings.warn(text, stacklevel=3)
            thing.to(self._device)
        if kind == "optimizer":
            self._check_optimizer(thing)
        number = sum(name.startswith(kind) for name in self.named)
        self.named[f"{kind}{number}"] = thing

    @property
    def modules(self) -> dict[str, nn.Module]:
        return {name: thing for name, thing in self.named.items() if isinstance(thing, nn.Module)}

    @property
    def optimizers(self) -> list[Any]:
        return [thing for name, thing in self.named.items() if name.startswith("optimizer")]

    @property
    def buffers(self) -> Buffers:
        return Buffers(self.modules)

    def parameters(self) -> dict[Tensor, str]:
        """The name of each parameter."""
        return {
            parameter: f"{name}.{key}"
            for name, module in self.modules.items()
            for key, parameter in module.named_parameters()
        }

    def drop_gradients(self) -> None:
        """Forget all gradients."""
        for module in self.modules.values():
            for parameter in module.parameters():
                parameter.grad = None

    def pack(self) -> PackedState:
        """The present state of all objects."""
        return pack_state(self.named)

    def restore(self, state: PackedState, source: str) -> None:
        """Give all objects a state."""
        restore_state(self.named, state, source)

    def describe(self) -> list[str]:
        """Names, types and shapes, which all workers must have in common."""
        lines = [f"{name}: {type(thing).__name__}" for name, thing in self.named.items()]
        for name, module in self.modules.items():
            lines += [f"{name}.{key} {tuple(t.shape)} {t.dtype}" for key, t in model_tensors(module).items()]
        return lines

    def _check_optimizer(self, optimizer: Any) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ModelError(
                f"{self._caller}: LBFGS computes the loss several times in a step, which is not possible "
                "here: take another optimizer"
            )
        known = self.parameters()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in known:
                    raise ModelError(
                        f"{self._caller}: {type(optimizer).__name__} trains a parameter of shape "
                        f"{tuple(parameter.shape)} of no module that was set up: give the modules first"
                    )


class Buffers:
    """The buffers of modules, such as running means; looked up each time, since a module may replace them."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules

    def all(self) -> list[Tensor]:
        """Floating buffers, then the others."""
        found = [buffer for module in self._modules.values() for _, buffer in module.named_buffers()]
        floating = [buffer for buffer in found if buffer.is_floating_point()]
        return [*floating, *(buffer for buffer in found if not buffer.is_floating_point())]

    def floats(self) -> list[Tensor]:
        return [buffer for _, buffer in self._named(floating=True)]

    def ints(self) -> list[Tensor]:
        """Buffers that are not floating, such as counts."""
        return [buffer for _, buffer in self._named(floating=False)]

    def float_names(self) -> list[str]:
        return [name for name, _ in self._named(floating=True)]

    def int_names(self) -> list[str]:
        return [name for name, _ in self._named(floating=False)]

    @torch.no_grad()
    def restore(self, values: Sequence[Tensor]) -> None:
        """Give all buffers the values that `all` had."""
        for buffer, value in zip(self.all(), values, strict=True):
            buffer.copy_(value)

    def set(self, floats: Sequence[Tensor], ints: Sequence[Tensor]) -> None:
        """Give the buffers new values."""
        self.restore([*floats, *ints])

    def _named(self, floating: bool) -> list[tuple[str, Tensor]]:
        return [
            (f"{name}.{key}", buffer)
            for name, module in self._modules.items()
            for key, buffer in module.named_buffers()
            if buffer.is_floating_point() == floating
        ]


def _kind(thing: Any, caller: str) -> str:
    if isinstance(thing, nn.Module):
        return "module"
    if isinstance(thing, torch.optim.Optimizer):
        return "optimizer"
    if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
        return "state"
    raise ModelError(
        f"{caller}: {type(thing).__name__} has no state_dict and load_state_dict: give modules, "
        "optimizers, schedules and the like"
    )


def check_module(module: nn.Module, caller: str) -> None:
    for name, part in module.named_modules():
        if isinstance(part, nn.SyncBatchNorm):
            raise ModelError(
                f"{caller}: '{name}' is a SyncBatchNorm, which computes with samples of all workers: "
                "use BatchNorm, whose statistics are those of a lane"
            )
        if isinstance(part, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise ModelError(f"{caller}: give the module inside {type(part).__name__}: lanes take its place")
