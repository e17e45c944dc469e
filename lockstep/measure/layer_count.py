"""Counts what every layer of a model computes and holds, from one forward pass of small batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.measure.time_by_kind import kind_of
from lockstep.spec.profile import LayerProfile, WeightShape

_IMAGES = 2  # a batch norm after a global pooling needs two


@dataclass(frozen=True)
class LayerCall:
    """A layer in the order of the forward pass: its module, and what it was given."""

    profile: LayerProfile
    module: nn.Module
    given: Tensor
    is_first: bool  # given the images, which need no gradient


def count_layers(model: nn.Module, shape: tuple[int, int, int]) -> list[LayerProfile]:
    """The layers that a training step calls, for images of a shape; the model is not changed."""
    return [call.profile for call in watch_layers(model, torch.zeros(_IMAGES, *shape))]


def list_weights(model: nn.Module) -> tuple[WeightShape, ...]:
    """The parameters that are trained."""
    named = model.named_parameters()
    return tuple(WeightShape(name, tuple(p.shape)) for name, p in named if p.requires_grad)


def list_buffers(model: nn.Module) -> tuple[int, ...]:
    """The values of each floating buffer."""
    return tuple(buffer.numel() for buffer in model.buffers() if buffer.is_floating_point())


def watch_layers(model: nn.Module, images: Tensor) -> list[LayerCall]:
    """The same with what each layer was given; modules without modules inside are layers."""
    calls: list[LayerCall] = []
    names: dict[str, int] = {}

    def note(name: str, module: nn.Module, given: tuple[Any, ...], output: object) -> None:
        if given and isinstance(given[0], Tensor) and isinstance(output, Tensor):
            names[name] = names.get(name, 0) + 1
            again = f" ({names[name]})" if names[name] > 1 else ""
            profile = _count(name + again, module, given[0], output)
            if names[name] > 1:  # its parameters are there once
                profile = replace(profile, parameters=0)
            is_first = given[0].data_ptr() == images.data_ptr()
            calls.append(LayerCall(profile, module, given[0].detach(), is_first))

    leaves = [(name, module) for name, module in model.named_modules() if not [*module.children()]]
    handles = [module.register_forward_hook(partial(note, name)) for name, module in leaves]
    try:
        with torch.no_grad(), _unchanged(model):
            model.train()(images)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _count(name: str, module: nn.Module, given: Tensor, output: Tensor) -> LayerProfile:
    images = len(given)
    weights = [p for p in module.parameters() if p.dim() > 1 and len(p)]
    where = given if isinstance(module, nn.ConvTranspose2d) else output
    macs = sum(weight.numel() * (where.numel() // len(weight)) for weight in weights) / images
    has_rows = output.dim() == 4
    return LayerProfile(
        name=name,
        kind=kind_of(type(module).__name__),
        macs=macs,
        parameters=sum(p.numel() for p in module.parameters()),
        inputs=given.numel() // images,
        outputs=output.numel() // images,
        rows=output.shape[2] if has_rows else 1,
        channels=output.shape[1] if output.dim() > 1 else 1,
        halo=_halo(module) if has_rows else 0,
        groups=int(getattr(module, "groups", 1)),
    )


def _halo(module: nn.Module) -> int:
    """Rows beyond its own that a band of the output needs at one edge."""
    kernel, dilation = (getattr(module, key, 1) for key in ("kernel_size", "dilation"))
    rows = [part[0] if isinstance(part, tuple) else part for part in (kernel, dilation)]
    return int((rows[0] - 1) * rows[1] // 2)


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Put the buffers, the mode and the random numbers back."""
    mode, state = model.training, torch.random.get_rng_state()
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        model.train(mode)
        torch.random.set_rng_state(state)
        for name, buffer in model.named_buffers():
            buffer.copy_(kept[name])
