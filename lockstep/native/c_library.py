"""Compiles C and C++ with the system's compiler and loads it."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from lockstep.native.nvrtc import CompileFailed, NoCompiler
from lockstep.spec.system import cache_folder

_FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC", "-pthread")
EXACT = ("-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno", "-Wno-psabi")  # each sum as written
_LANGUAGES = {
    "c": ("CC", ("cc", "gcc", "clang"), ("-std=gnu11",)),
    "c++": ("CXX", ("c++", "g++", "clang++"), ("-std=gnu++17", "-fno-schedule-insns")),
}  # reordering before registers are dealt makes GCC run out of them in a tile


@cache
def compile_c(source: str, language: str = "c") -> ctypes.CDLL:
    """A library of the source, as fast as the compiler makes it for this processor."""
    with tempfile.TemporaryDirectory() as folder:
        return ctypes.CDLL(str(build_library(source, Path(folder, "library.so"), language)))


def keep_library(source: str, flags: Sequence[str]) -> ctypes.CDLL:
    """A library of C, compiled with more flags if this machine has not done so before.

    Of several processes that ask at once one compiles, and the others wait. If nothing can be kept, all do.
    """
    compiler = Path(find_compiler())
    facts = [source, *_FLAGS, *flags, str(compiler), str(compiler.stat().st_mtime_ns), _processor()]
    name = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:32]
    folder = cache_folder() / "native"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{name}.lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = folder / f"{name}.so"
            if not path.exists():
                build_library(source, path.with_suffix(".new"), flags=flags).replace(path)
            return ctypes.CDLL(str(path))
    except (OSError, RuntimeError):  # no home, a full or read-only disk, one without locks or programs
        with tempfile.TemporaryDirectory() as other:
            return ctypes.CDLL(str(build_library(source, Path(other, "library.so"), flags=flags)))


def build_library(source: str, path: Path, language: str = "c", flags: Sequence[str] = ()) -> Path:
    """The same as a file, which several processes may load."""
    compiler = find_compiler(language)
    command = [compiler, *_FLAGS, *_LANGUAGES[language][2], *flags, "-x", language, "-", "-o", str(path)]
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


def _processor() -> str:
    """What this processor can do, by which a compiler chooses instructions."""
    told = ("model name", "flags", "CPU implementer", "CPU part", "Features")
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")
    except OSError:
        return ""
    return "\n".join(line for line in first.splitlines() if line.startswith(told))
