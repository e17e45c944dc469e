"""Published weights, which timm downloads and keeps in its cache, and the images that they were trained on.

It follows registry.build, for `model.weights=pretrained`; `weights.py` puts them into the model.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import ModelError
from lockstep.models.weights_form import WeightsForm
from lockstep.spec.system import extra_command

PRETRAINED = "pretrained"  # a value of model.weights, in the place of a path
TIMM = "timm:"
_ALSO_OURS = ("resnet18", "resnet34", "resnet50")  # models of ours that timm has, too


def import_timm(name: str) -> Any:
    """timm, which is imported late because few runs need it; `name` is the model that does."""
    try:
        return importlib.import_module("timm")
    except ModuleNotFoundError as error:
        raise ModelError(
            f"model.name={name} needs {error.name}, not installed: {extra_command('timm')}"
        ) from None
    except Exception as error:  # timm imports torchvision, which fails with another build of torch
        raise ModelError(
            f"model.name={name}: timm cannot be imported ({error}): install the torchvision "
            f"that was built for torch {torch.__version__}, from the package index that torch came from"
        ) from None


def fetch_published(name: str, in_channels: int, options: Mapping[str, Any]) -> dict[str, Tensor]:
    """The published weights of a model, under timm's names, with the head that they were published with."""
    timm, theirs = import_timm(name), _name_in_timm(name)
    own = options if name.startswith(TIMM) else {}
    try:
        model = timm.create_model(theirs, pretrained=True, in_chans=in_channels, **own)
    except Exception as error:  # of timm, of the hub that it asks, or of the network
        reason = shorten(str(error) or type(error).__name__, 200, placeholder=" …")
        raise ModelError(
            f"model.weights=pretrained: timm could not get the weights of {theirs} ({reason}): it downloads "
            "them, which needs a network. A file that you have: model.weights=FILE.safetensors; a run of "
            "yours: --fork RUN; to start from nothing: model.weights=none"
        ) from error
    found: dict[str, Tensor] = model.state_dict()
    return found


def published_form(name: str) -> WeightsForm | None:
    """The images that a model's published weights were trained on; None if timm does not say."""
    timm, theirs = import_timm(name), _name_in_timm(name)
    config = timm.get_pretrained_cfg(theirs) if timm.is_model(theirs) else None
    if config is None:
        return None
    return WeightsForm(tuple(config.mean), tuple(config.std), int(config.input_size[-1]))


def _name_in_timm(name: str) -> str:
    if not (name.startswith(TIMM) or name in _ALSO_OURS):
        known = ", ".join(_ALSO_OURS)
        raise ModelError(
            f"model.weights=pretrained: there are published weights for {known} and timm:NAME, not for {name}"
        )
    return name.removeprefix(TIMM)
