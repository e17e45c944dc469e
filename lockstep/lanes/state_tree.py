"""The state of a user's objects as tensors by name and one JSON text: for checkpoints, and for other workers.

Modules, optimizers, learning rate schedules, gradient scalers, and anything else with a `state_dict`.
Nothing is pickled: values that JSON has no form for are tagged, and a type that is not known is refused.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.group import Group
from lockstep.errors import LockstepError, WorkersDiffer
from lockstep.models.tensors import model_tensors, tensors_sha256

_TAG = "$"
_DICTS = {"dict": dict, "OrderedDict": collections.OrderedDict, "Counter": collections.Counter}
_LISTS = {"tuple": tuple, "set": set}


@dataclass(frozen=True)
class PackedState:
    """The state of several objects: one table for JSON, and the tensors that it names."""

    table: dict[str, Any]
    tensors: dict[str, Tensor]

    def sha256(self) -> str:
        """A hash over all of it."""
        return tensors_sha256({**self.tensors, repr(self.table): torch.zeros(0)})


def pack_state(objects: Mapping[str, Any]) -> PackedState:
    """The present state of named objects; tensors are not copied."""
    tensors: dict[str, Tensor] = {}
    table = {}
    for name, thing in objects.items():
        state = dict(model_tensors(thing)) if isinstance(thing, nn.Module) else thing.state_dict()
        table[name] = _pack(state, name, tensors)
    return PackedState(table, tensors)


@torch.no_grad()
def restore_state(objects: Mapping[str, Any], state: PackedState, source: str) -> None:
    """Give objects a packed state; an error names what does not fit, and `source`, where it came from."""
    if objects.keys() != state.table.keys():
        odd = sorted(objects.keys() ^ state.table.keys())
        raise LockstepError(
            f"{source}: has the state of other objects than were set up here ({', '.join(odd[:4])}): "
            "call setup with the same objects, in the same order"
        )
    unpacked = {name: _unpack(value, state.tensors) for name, value in state.table.items()}
    for name, thing in objects.items():
        if isinstance(thing, nn.Module):
            _check_module(name, thing, unpacked[name], source)
    for name, thing in objects.items():
        if isinstance(thing, nn.Module):
            for key, tensor in model_tensors(thing).items():
                tensor.copy_(unpacked[name][key])
        else:
            thing.load_state_dict(unpacked[name])


def broadcast_state(
    group: Group, source: int, cursor: dict[str, Any], state: PackedState | None
) -> tuple[dict[str, Any], PackedState]:
    """The cursor and the state of one worker on all of them; only that worker gives a state."""
    tensors = state.tensors if state else {}
    forms = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()]
    table = {"cursor": cursor, "table": state.table if state else {}, "tensors": forms}
    told = json.loads(group.broadcast_bytes(json.dumps(table).encode(), source))
    arrived = {}
    for name, dtype, shape in told["tensors"]:
        # through the host: the receivers may have no GPU tensor of that size yet
        here = tensors[name].cpu().contiguous() if state else torch.empty(shape, dtype=getattr(torch, dtype))
        group.broadcast(here, source)
        arrived[name] = here
    return told["cursor"], PackedState(told["table"], arrived)


def prove_equal(group: Group, state: PackedState, where: str) -> None:
    """Raise an error if workers have different states; a collective."""
    if len(set(group.all_gather_bytes(state.sha256().encode()))) > 1:  # then which tensor is it?
        mine = {name: tensors_sha256({name: t}) for name, t in state.tensors.items()}
        mine[""] = state.sha256()
        for rank, text in enumerate(group.all_gather_bytes(json.dumps(mine).encode())):
            odd = [name for name, value in json.loads(text).items() if mine.get(name) != value]
            if odd:
                raise WorkersDiffer(
                    f"{where}: worker {rank} has another {odd[0] or 'state'} than worker {group.rank}: the "
                    "script changed it outside of steps, by something that differs between workers"
                )


def _check_module(name: str, module: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    mine = model_tensors(module)
    odd = sorted(mine.keys() ^ state.keys())
    odd += [key for key in mine.keys() & state.keys() if mine[key].shape != state[key].shape]
    if odd:
        raise LockstepError(f"{source}: does not fit {name} ({type(module).__name__}): {', '.join(odd[:4])}")


def _pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return {_TAG: "tensor", "name": path}
    kind = type(value).__name__
    if isinstance(value, collections.defaultdict):  # as in a gradient scaler or an optimizer
        kind = "dict"
    if kind in _DICTS:
        return {
            _TAG: kind,
            "items": [[_pack(k, path, tensors), _pack(v, f"{path}.{k}", tensors)] for k, v in value.items()],
        }
    if isinstance(value, list):
        return [_pack(v, f"{path}.{n}", tensors) for n, v in enumerate(value)]
    if kind in _LISTS:
        values = sorted(value) if kind == "set" else value
        return {_TAG: kind, "items": [_pack(v, f"{path}.{n}", tensors) for n, v in enumerate(values)]}
    raise LockstepError(
        f"the state of {path} holds a {kind}, which cannot be saved: its state_dict may hold tensors, "
        "numbers, texts, lists and dicts"
    )


def _unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpack(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    kind = value[_TAG]
    if kind == "tensor":
        return tensors[value["name"]].clone()
    if kind in _DICTS:
        return _DICTS[kind]({_unpack(k, tensors): _unpack(v, tensors) for k, v in value["items"]})
    return _LISTS[kind](_unpack(v, tensors) for v in value["items"])
