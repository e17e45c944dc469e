"""Loads a cubin and starts its kernel on torch's current stream."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from lockstep.errors import LockstepError

Size3 = tuple[int, int, int]
_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class CudaKernel:
    """A kernel that takes pointers to tensors, or raw bytes by value."""

    def __init__(self, device: torch.device, cubin: bytes, name: str, shared_bytes: int = 0) -> None:
        self._device = device
        torch.cuda.synchronize(device)  # makes torch's context this thread's
        module, self._function, self._shared = ctypes.c_void_p(), ctypes.c_void_p(), shared_bytes
        call_driver("cuModuleLoadData", ctypes.byref(module), cubin)
        call_driver("cuModuleGetFunction", ctypes.byref(self._function), module, name.encode())
        if shared_bytes > 48 << 10:
            call_driver("cuFuncSetAttribute", self._function, _DYNAMIC_SHARED, shared_bytes)

    def __call__(self, grid: Size3, block: Size3, arguments: Sequence[Tensor | bytes]) -> None:
        """Start it; nothing waits."""
        held = [_hold(each) for each in arguments]
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(each) for each in held))
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        call_driver("cuLaunchKernel", self._function, *grid, *block, self._shared, stream, pointers, None)


def _hold(argument: Tensor | bytes) -> ctypes.c_void_p | ctypes.Array[ctypes.c_char]:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.create_string_buffer(argument, len(argument))


def call_driver(name: str, *arguments: object) -> None:
    """Call a function of the GPU's driver; an error is raised with the driver's own words."""
    code = getattr(_driver(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise LockstepError(f"{name}: {(text.value or b'?').decode()}")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
