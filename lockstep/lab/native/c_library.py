"""Compiles C with the system's compiler and loads it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from lockstep.lab.native.nvrtc import CompileFailed, NoCompiler

_FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-std=gnu11", "-shared", "-fPIC", "-pthread")


@cache
def compile_c(source: str) -> ctypes.CDLL:
    """A library of the source, as fast as the compiler makes it for this processor."""
    compiler = find_compiler()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "library.so")
        command = [compiler, *_FLAGS, "-x", "c", "-", "-o", str(path)]
        done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompileFailed(f"{compiler}: {done.stderr.strip()}")
        return ctypes.CDLL(str(path))


def find_compiler() -> str:
    """The C compiler: $CC, else cc, gcc or clang."""
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        if name and (found := shutil.which(name)):
            return found
    raise NoCompiler("there is no C compiler: install gcc or clang, or name one in $CC")
