"""Records every operation of torch with a hash of its results: forward and backward passes, by module."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.errors import ModelError
from lockstep.kernels.structure import leaves

_UNSET = ("empty", "resize_", "new_empty")  # operations whose result is memory that nobody has written


@dataclass(frozen=True)
class Operation:
    """One operation: its name, the module in whose forward pass it ran, and a hash of its results."""

    name: str
    module: str
    digest: bytes


class OperationRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operation of torch with a hash of its results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self._inside: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if name.startswith("c10d"):
            raise ModelError(f"{name} computes with samples of other workers: a lane must be computed alone")
        if not name.partition(".")[2].startswith(_UNSET):
            where = self._inside[-1] if self._inside else ""
            self.operations.append(Operation(name, where, _digest(result)))
        return result

    @contextmanager
    def modules(self, model: nn.Module) -> Iterator[None]:
        """Note which module's forward pass runs."""

        def enter(name: str, module: nn.Module, given: Any) -> None:
            self._inside.append(f"'{name}' ({type(module).__name__})")

        def leave(module: nn.Module, given: Any, output: Any) -> None:
            self._inside.pop()

        handles = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(partial(enter, name)))
            handles.append(module.register_forward_hook(leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _digest(result: Any) -> bytes:
    parts = hashlib.blake2b(digest_size=16)
    for tensor in leaves(result):
        if tensor.layout == torch.strided:
            flat = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).view(-1)
            parts.update(flat.view(torch.uint8).numpy().data)
    return parts.digest()
