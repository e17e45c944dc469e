"""Runs CUDA kernels on a CPU: compiled by g++ behind cuda_on_cpu.h, guarded against strays."""

import ctypes
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

_HEADER = Path(__file__).with_name("cuda_on_cpu.h")
_FLAGS = ("-O1", "-std=c++17", "-ffp-contract=off", "-fno-strict-aliasing", "-w", "-shared", "-fPIC")
_APART = "-fno-gnu-unique"  # libraries would share their shared memory
_GUARD_ELEMENTS = 256

needs_gxx = pytest.mark.skipif(not shutil.which("g++"), reason="no g++")


def run_cuda_on_cpu(source, name, grid, block, arguments, defines):
    """Start kernel `name` of `source` as CudaKernel would; tensors on the CPU are changed in place.

    It runs twice, with threads in both orders: the bits must agree. Around every tensor lie values that are
    no numbers: reading them spoils the result, and writing them fails.
    """
    kernel = getattr(_compile(source, tuple(defines.items())), f"start_{name}")
    first, second = (_start(kernel, grid, block, arguments, order) for order in (0, 1))
    for argument, one, other in zip(arguments, first, second, strict=True):
        if isinstance(argument, torch.Tensor):
            same = one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8)
            assert torch.equal(*same), f"{name}: the order of threads changes bits: is a barrier missing?"
            argument.copy_(one)


def _start(kernel, grid, block, arguments, order):
    kept, values, found = [], [], []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            guarded = _guard(argument)
            kept.append(guarded)
            found.append(guarded[_GUARD_ELEMENTS:-_GUARD_ELEMENTS].view(argument.shape))
            values.append(ctypes.c_void_p(found[-1].data_ptr()))
        else:
            found.append(argument)
            values.append(ctypes.create_string_buffer(argument, len(argument)))
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    assert kernel((ctypes.c_uint * 6)(*grid, *block), pointers, order) == 0, "at most 1024 threads a block"
    for guarded in kept:
        for end in (guarded[:_GUARD_ELEMENTS], guarded[-_GUARD_ELEMENTS:]):
            assert bool((end.view(torch.uint8) == 0xFF).all()), "the kernel wrote outside of a tensor"
    return found


def _guard(tensor):
    size_bytes = (tensor.numel() + 2 * _GUARD_ELEMENTS) * tensor.element_size()
    guarded = torch.full((size_bytes,), 255, dtype=torch.uint8).view(tensor.dtype)
    guarded[_GUARD_ELEMENTS:-_GUARD_ELEMENTS] = tensor.reshape(-1)
    return guarded


@cache
def _compile(source, defines):
    """A library that starts each kernel of a source."""
    macros = "".join(f"#define {key} {value}\n" for key, value in defines)
    undone = "".join(f"#undef {key}\n" for key, _ in defines)
    starts = "".join(
        f'extern "C" int start_{name}(const unsigned *sizes, void **values, int order) '
        f"{{ return on_cpu::launch<{name}>(sizes, values, order); }}\n"
        for name in re.findall(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(", source)
    )
    text = f'#include "{_HEADER}"\n{macros}{source}\n{undone}{starts}'
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernels.so")
        command = ["g++", *_FLAGS, _APART, "-x", "c++", "-", "-o", str(path)]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:2000]
        return ctypes.CDLL(str(path))
