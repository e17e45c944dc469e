"""The models by name: builds one from a Run's `[model]` table and the shape of the data.

Initialization draws from torch's default generator, which the caller seeds, and from nothing else.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep.errors import ModelError, unknown
from lockstep.kernels import random
from lockstep.models import option
from lockstep.models.alexnet import AlexNet
from lockstep.models.emotion48 import Emotion48
from lockstep.models.freeze import freeze_parts
from lockstep.models.googlenet import GoogLeNet
from lockstep.models.lenet5 import LeNet5
from lockstep.models.pretrained import TIMM, import_timm
from lockstep.models.resnet import resnet18, resnet34, resnet50
from lockstep.models.vgg11 import VGG11
from lockstep.spec import Run


@dataclass(frozen=True)
class ModelEntry:
    """A builder, called as (in_channels, num_classes, image_size, **options), and its smallest image."""

    builder: Callable[..., nn.Module]
    min_side: int


_MODELS = {
    "emotion48": ModelEntry(Emotion48, 8),
    "lenet5": ModelEntry(LeNet5, 12),
    "alexnet": ModelEntry(AlexNet, 63),
    "googlenet": ModelEntry(GoogLeNet, 16),
    "vgg11": ModelEntry(VGG11, 32),
    "resnet18": ModelEntry(resnet18, 8),
    "resnet34": ModelEntry(resnet34, 8),
    "resnet50": ModelEntry(resnet50, 8),
}
_SMALL = ("lenet5", "emotion48")  # models to suggest if the images are too small for another


def model_names() -> tuple[str, ...]:
    """The names of all our models; `timm:NAME` names one of timm's."""
    return tuple(_MODELS)


def model_options(name: str) -> tuple[str, ...]:
    """The option keys of a model; none for `timm:NAME`, whose keys only timm knows."""
    return () if name.startswith(TIMM) else option.builder_options(_entry(name).builder)


def build(
    name: str,
    *,
    in_channels: int,
    num_classes: int,
    image_size: tuple[int, int],
    options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """The model `name` for images [in_channels, *image_size], freshly initialized, in training mode."""
    options = dict(options or {})
    for what, count in (("channels", in_channels), ("classes", num_classes)):
        if count < 1:
            raise ModelError(f"model.name={name} needs data with {what}; data gives {count}: check data.name")
    if name.startswith(TIMM):
        return _build_timm(name, in_channels, num_classes, options)
    entry = _entry(name)
    option.check_options(name, entry.builder, options)
    if min(image_size) < entry.min_side:
        raise ModelError(_too_small(name, entry.min_side, image_size))
    return entry.builder(in_channels, num_classes, image_size, **options)


def build_model(
    run: Run, shape: tuple[int, int, int], num_classes: int, without_memory: bool = False
) -> nn.Module:
    """The model that a Run names; its weights are a pure function of the seed.

    `without_memory`: on torch's `meta` device, as shapes alone. timm computes with tensors while it builds,
    so its models have memory for a moment.
    """
    early = without_memory and not run.model.name.startswith(TIMM)
    with torch.random.fork_rng(), torch.device("meta" if early else "cpu"):
        torch.manual_seed(random.key("init", run.seed))
        model = build(
            run.model.name,
            in_channels=shape[0],
            num_classes=num_classes,
            image_size=(shape[1], shape[2]),
            options=run.model.options,
        )
    freeze_parts(model, run.model.freeze)
    return model.to("meta") if without_memory else model


def _entry(name: str) -> ModelEntry:
    try:
        return _MODELS[name]
    except KeyError:
        raise ModelError(unknown("model", name, _MODELS)) from None


def _too_small(name: str, min_side: int, image_size: tuple[int, int]) -> str:
    height, width = image_size
    fix = f"set data.size={-(-min_side // 8) * 8}"
    fitting = [small for small in _SMALL if _MODELS[small].min_side <= min(image_size)]
    if fitting:
        fix += f" or choose {fitting[0]}"
    return f"{name} needs images of at least {min_side}x{min_side}; data gives {height}x{width}: {fix}"


def _build_timm(name: str, in_channels: int, num_classes: int, options: Mapping[str, Any]) -> nn.Module:
    """Build one of timm's models."""
    timm = import_timm(name)
    timm_name = name.removeprefix(TIMM)
    if not timm.is_model(timm_name):
        near = difflib.get_close_matches(timm_name, timm.list_models(), n=1, cutoff=0.5)
        fix = f"did you mean '{TIMM}{near[0]}'?" if near else "timm.list_models() lists them all"
        raise ModelError(f"model.name={name}: timm has no model '{timm_name}': {fix}")
    taken = {"pretrained": False, "in_chans": in_channels, "num_classes": num_classes}
    for key in options:
        if key in taken:
            raise ModelError(f"model.{key}: the data and model.weights decide this for {name}: remove it")
    try:
        model: nn.Module = timm.create_model(timm_name, **taken, **options)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"model.name={name}: timm refuses options {dict(options)}: {reason}") from error
    return model
