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
from lockstep.models.pretrained import PRETRAINED, fetch_published, published_form
from lockstep.models.source_hash import describe_callable, describe_module, describe_values
from lockstep.models.tensors import model_tensors, tensors_sha256, trainable
from lockstep.models.weights import head_names, load_published
from lockstep.models.weights_form import WeightsForm, file_form
from lockstep.runs.tensor_file import file_sha256
from lockstep.spec import Run
from lockstep.spec.identity import Identity
from lockstep.spec.rule.param_pattern import check_patterns, split_rates


def make_model(
    run: Run, store: Store, recorded: Identity | None, source: dict[str, Any], notices: list[str]
) -> nn.Module:
    """The model that a Run names, with the weights it starts from; fills in its `source` and `notices`.

    A resumed run, whose identity is `recorded`, no longer needs the file of these weights.
    """
    model = build_model(run, store.shape, len(store.classes))
    _check_rates(run, model)
    if run.model.weights:
        if recorded and (run.model.weights == PRETRAINED or not Path(run.model.weights).exists()):
            source["weights_sha256"] = recorded.get("source.weights_sha256")
        else:
            source["weights_sha256"], told = _start_from(run, model, store)
            notices += told
    return model


def describe_own(run: Run, model: Any, source: dict[str, Any]) -> None:
    """Fill in the `source` of a module that a script gives; anything else is refused."""
    if not isinstance(model, nn.Module):
        what = model.__name__ if isinstance(model, type) else type(model).__name__
        raise ModelError(f"model: {what} is no module: give an instance of torch.nn.Module, as Net()")
    _check_rates(run, model)
    source["model"] = describe_module(model)
    source["model"]["weights_sha256"] = tensors_sha256(model_tensors(model))
    if run.model.weights:
        raise ModelError("model.weights is for models by name: load weights into your own module yourself")
    if run.model.freeze:
        raise ModelError("model.freeze is for models by name: set requires_grad_(False) in your own module")


def describe_augment(function: OwnFunction, store: Store) -> str:
    """A name for a script's augmentation that changes with its source, values and results; tries it out."""
    tried = OwnChange(function, 0).try_out(store.shape)
    return f"{describe_callable(function)} {describe_values(function)} {tried}"


def explain_host_path(function: OwnFunction, device: torch.device) -> list[str]:
    """A line for a run on a GPU, where images would else stay."""
    name = getattr(function, "__name__", type(function).__name__)
    told = f"augment={name} runs on the host: images are read and sent for every step, none stay on the GPU"
    return [told] if device.type == "cuda" else []


def _check_rates(run: Run, model: nn.Module) -> None:
    """Refuse a pattern of `optimizer.rates` that names nothing that is trained."""
    patterns = [pattern for pattern, _ in split_rates(run.optimizer.rates)]
    check_patterns("optimizer.rates", patterns, trainable(model), head_names(model))


def _start_from(run: Run, model: nn.Module, store: Store) -> tuple[str, list[str]]:
    """Load the weights that the Run names; gives their hash, and what is to be said of them."""
    name, path = run.model.name, Path(run.model.weights or "")
    if run.model.weights == PRETRAINED:
        tensors = fetch_published(name, store.shape[0], run.model.options)
        renewed, sha256 = load_published(model, tensors), tensors_sha256(tensors)
        form, what = published_form(name), f"published weights of {name}, as timm has them"
    else:
        renewed, sha256 = load_weights(model, path), file_sha256(path)
        form, what = file_form(path), f"weights of {path}"
    notices = [f"starting from the {what}"]
    if renewed:
        notices.append(f"the head has another size and starts anew: {', '.join(renewed)}")
    own = WeightsForm(store.mean, store.std, store.shape[-1], store.classes)
    return sha256, notices + (form.explain(own) if form else [])
