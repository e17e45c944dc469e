"""Loads weights from a safetensors file, or those that timm gives, matched by name and checked first.

It follows registry.build, for `model.weights`. The file is a checkpoint's state file, where the model's
tensors are named "model.NAME" beside other groups, a plain export with bare names, or one of torchvision's
or timm's (`foreign_names.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from lockstep.errors import ModelError
from lockstep.models.block import BlockModel
from lockstep.models.foreign_names import is_foreign, own_names, why_other
from lockstep.models.pretrained import PRETRAINED

_GROUP, _AVERAGED = "model.", "ema."
_COUNT = ".num_batches_tracked"  # older files do not have these
_PICKLES = (b"PK\x03\x04", b"\x80\x02")  # what files of torch.save begin with


@dataclass(frozen=True)
class _Given:
    """Tensors to be loaded, each of which is read when it is asked for."""

    where: str  # as an error names them
    names: Sequence[str]
    shape: Callable[[str], Sequence[int]]
    read: Callable[[str], Tensor]


def load_published(model: nn.Module, tensors: Mapping[str, Tensor]) -> list[str]:
    """Load published weights as `load_weights` does those of a file."""
    given = _Given(PRETRAINED, list(tensors), lambda name: tensors[name].shape, tensors.__getitem__)
    return _load(model, given)


def load_weights(model: nn.Module, path: Path) -> list[str]:
    """Load parameters and buffers by name; returns the head tensors skipped because their sizes differ."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ModelError(f"model.weights={path}: {what}: give the path of a .safetensors file")
    with path.open("rb") as file:
        if file.read(4).startswith(_PICKLES):
            raise ModelError(_pickle_error(path))
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            return _load(
                model,
                _Given(str(path), names, lambda name: file.get_slice(name).get_shape(), file.get_tensor),
            )
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(
            f"model.weights={path}: not a readable safetensors file ({reason}):"
            " give one written by `lockstep export --format safetensors` or a checkpoint's"
        ) from error


def _load(model: nn.Module, given: _Given) -> list[str]:
    own, keys, where = model.state_dict(), given.names, given.where
    if is_foreign(model, keys):
        if reason := why_other(model):
            raise ModelError(f"model.weights={where}: of another network: {reason}: start without it")
        stored = own_names(model, keys)
        own = {name: value for name, value in own.items() if name in stored or not name.endswith(_COUNT)}
    else:
        stored = _stored_names(keys, own)
    missing = sorted(own.keys() - stored.keys())
    surplus = sorted(stored.keys() - own.keys() - dict(model.named_buffers()).keys())
    if missing or surplus:
        raise ModelError(_name_error(where, missing, [stored[name] for name in surplus]))
    reset = [name for name, tensor in own.items() if list(tensor.shape) != list(given.shape(stored[name]))]
    heads = head_names(model)
    for name in reset:
        if name not in heads:
            raise ModelError(_shape_error(where, name, given.shape(stored[name]), own[name]))
    with torch.no_grad():
        for name, tensor in own.items():
            if name not in reset:
                tensor.copy_(given.read(stored[name]))
    return reset


def _stored_names(keys: Iterable[str], own: dict[str, Tensor]) -> dict[str, str]:
    """Maps each tensor's name in the model to its name in the file.

    The prefix "model." marks a checkpoint's group, unless the model's own names have it. If the run kept
    averaged weights, these are taken, because the run was evaluated with them.
    """
    keys = list(keys)
    if any(key.startswith(_GROUP) and key not in own for key in keys):
        stored = {key.removeprefix(_GROUP): key for key in keys if key.startswith(_GROUP)}
        averaged = {key.removeprefix(_AVERAGED): key for key in keys if key.startswith(_AVERAGED)}
        return stored | averaged
    return {key: key for key in keys}


def head_names(model: nn.Module) -> set[str]:
    """The names of the tensors whose size depends on the number of classes: the last layer of each head.

    A head is a BlockModel's sequence of blocks, or another module as a whole, and each auxiliary head.
    """
    heads: dict[str, nn.Module] = {"blocks": model.blocks} if isinstance(model, BlockModel) else {"": model}
    aux = getattr(model, "aux", None)
    if isinstance(aux, nn.ModuleDict):
        heads.update({f"aux.{name}": head for name, head in aux.items()})
    layers = [_last_layer(prefix, head) for prefix, head in heads.items()]
    return {name for name in model.state_dict() if name.rpartition(".")[0] in layers}


def _last_layer(prefix: str, head: nn.Module) -> str | None:
    """The full name of the last module under `head` that holds parameters of its own."""
    holders = [name for name, module in head.named_modules(prefix=prefix) if module._parameters]
    return holders[-1] if holders else None


def _pickle_error(path: Path) -> str:
    new = path.with_suffix(".safetensors").name
    return (
        f"model.weights={path}: a file of torch.save, which is not read, as it may hold code: read it by "
        f"torch.load with weights_only=True, and write {new} by safetensors.torch.save_file"
    )


def _name_error(where: str, missing: list[str], surplus: list[str]) -> str:
    found = []
    if missing:
        found.append(f"lacks {_some(missing)}")
    if surplus:
        found.append(f"has {_some(surplus)}, which the model has not")
    fix = "set model.name and its options to those of the run that saved it"
    return f"model.weights={where}: {' and '.join(found)}: {fix}"


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _shape_error(where: str, name: str, shape: Sequence[int], tensor: Tensor) -> str:
    return (
        f"model.weights={where}: {name} is {list(shape)} in the file and {list(tensor.shape)} in the model:"
        " only the last layer may differ, so set data.size and the model's options to those it was saved with"
        " (a ResNet of torchvision or timm needs -o model.stem=imagenet, or images of 96 pixels or more)"
    )
