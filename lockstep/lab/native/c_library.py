"""Compiles C and C++ with the system's compiler and loads it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from lockstep.lab.native.nvrtc import CompileFailed, NoCompiler

_FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC", "-pthread")
_LANGUAGES = {
    "c": ("CC", ("cc", "gcc", "clang"), ("-std=gnu11",)),
    "c++": ("CXX", ("c++", "g++", "clang++"), ("-std=gnu++17", "-fno-schedule-insns")),
}  # reordering before registers are dealt makes GCC run out of them in a tile


@cache
def compile_c(source: str, language: str = "c") -> ctypes.CDLL:
    """A library of the source, as fast as the compiler makes it for this processor."""
    with tempfile.TemporaryDirectory() as folder:
        return ctypes.CDLL(str(build_library(source, Path(folder, "library.so"), language)))


def build_library(source: str, path: Path, language: str = "c") -> Path:
    """The same as a file, which several processes may load."""
    compiler = find_compiler(language)
    command = [compiler, *_FLAGS, *_LANGUAGES[language][2], "-x", language, "-", "-o", str(path)]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileFailed(f"{compiler}: {done.stderr.strip()}")
    return path


def find_compiler(language: str = "c") -> str:
    """The C compiler: $CC, else cc, gcc or clang; of C++: $CXX, c++, g++ or clang++."""
    variable, names, _ = _LANGUAGES[language]
    for name in (os.environ.get(variable, ""), *names):
        if name and (found := shutil.which(name)):
            return found
    what = "install gcc or clang" if language == "c" else "install g++ or clang++"
    raise NoCompiler(f"there is no {language.upper()} compiler: {what}, or name one in ${variable}")
