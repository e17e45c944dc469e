"""What a run starts with, and its part of the identity: a model by name; a script's module, augmentation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.data import Store
from lockstep.data.changes.own_change import OwnChange, OwnFunction
from lockstep.errors import ModelError
from lockstep.models import build_model, load_weights
from lockstep.models.source_hash import describe_callable, describe_module, describe_values
from lockstep.models.tensors import model_tensors, tensors_sha256
from lockstep.runs.tensor_file import file_sha256
from lockstep.spec import Run
from lockstep.spec.identity import Identity


def make_model(
    run: Run, store: Store, recorded: Identity | None, source: dict[str, Any], notices: list[str]
) -> nn.Module:
    """The model that a Run names, with the weights it starts from; fills in its `source` and `notices`.

    A resumed run, whose identity is `recorded`, no longer needs the file of these weights.
    """
    model = build_model(run, store.shape, len(store.classes))
    if run.model.weights:
        path = Path(run.model.weights)
        if recorded and not path.exists():
            source["weights_sha256"] = recorded.get("source.weights_sha256")
        else:
            notices += _start_from(model, path)
            source["weights_sha256"] = file_sha256(path)
    return model


def describe_own(run: Run, model: Any, source: dict[str, Any]) -> None:
    """Fill in the `source` of a module that a script gives; anything else is refused."""
    if not isinstance(model, nn.Module):
        what = model.__name__ if isinstance(model, type) else type(model).__name__
        raise ModelError(f"model: {what} is no module: give an instance of torch.nn.Module, as Net()")
    source["model"] = describe_module(model)
    source["model"]["weights_sha256"] = tensors_sha256(model_tensors(model))
    if run.model.weights:
        raise ModelError("model.weights is for models by name: load weights into your own module yourself")


def describe_augment(function: OwnFunction, store: Store) -> str:
    """A name for a script's augmentation that changes with its source, values and results; tries it out."""
    tried = OwnChange(function, 0).try_out(store.shape)
    return f"{describe_callable(function)} {describe_values(function)} {tried}"


def explain_host_path(function: OwnFunction, device: torch.device) -> list[str]:
    """A line for a run on a GPU, where images would else stay."""
    name = getattr(function, "__name__", type(function).__name__)
    told = f"augment={name} runs on the host: images are read and sent for every step, none stay on the GPU"
    return [told] if device.type == "cuda" else []


def _start_from(model: nn.Module, path: Path) -> list[str]:
    renewed = load_weights(model, path)
    notices = [f"starting from the weights of {path}"]
    if renewed:
        notices.append(f"the head has another size and starts anew: {', '.join(renewed)}")
    return notices
