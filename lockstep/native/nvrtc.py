"""Compiles CUDA C++ to a cubin with NVRTC, which needs no GPU."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from lockstep.errors import LockstepError

_PLACES = ("nvidia/cu*/lib", "nvidia/cuda_nvrtc/lib", "torch/lib")  # of installed packages


class NoCompiler(LockstepError):
    """NVRTC is not installed."""


class CompileFailed(LockstepError):
    """NVRTC refused a source; the text has its log."""


def compile_cuda(source: str, arch: str, defines: Mapping[str, int | str]) -> bytes:
    """A cubin of `source` for a GPU such as sm_90a; `defines` are macros."""
    nvrtc, program = _library(), ctypes.c_void_p()
    flags = [f"--gpu-architecture={arch}", "--std=c++17", "-default-device"]
    flags += [f"-D{name}={value}" for name, value in defines.items()]
    words = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    try:
        if nvrtc.nvrtcCompileProgram(program, len(flags), words):
            raise CompileFailed(f"NVRTC for {arch}:\n{_text(nvrtc, program, 'ProgramLog')}")
        return _bytes(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _bytes(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    found = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, found)
    return found.raw


def _text(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> str:
    return _bytes(nvrtc, program, what).rstrip(b"\0").decode(errors="replace")


@cache
def _library() -> ctypes.CDLL:
    """NVRTC of a package (torch's CUDA build brings it), else of the system."""
    found = [
        path
        for folder in map(Path, sys.path)
        for place in _PLACES
        for path in sorted(folder.glob(f"{place}/libnvrtc.so*"))
    ]
    for name in [*map(str, found), "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise NoCompiler("NVRTC is not installed: pip install nvidia-cuda-nvrtc, or a CUDA build of torch")
