"""The rungs in C: which file, and what it needs before it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lockstep.native.c_library import compile_c

_FOLDER = Path(__file__).with_name("c")


@dataclass(frozen=True)
class CRung:
    """One way to multiply two matrices on a CPU."""

    name: str
    file: str
    is_packed: bool = False  # needs panel.h
    is_threaded: bool = False


C_RUNGS = (
    CRung("naive loops", "1_naive.c"),
    CRung("loop order", "2_loop_order.c"),
    CRung("blocked", "3_blocked.c"),
    CRung("vectorized", "4_vectorized.c", is_packed=True),
    CRung("threads", "5_threads.c", is_packed=True, is_threaded=True),
)


def multiply_on_cpu(rung: CRung, a: Tensor, b: Tensor, threads: int = 1) -> Tensor:
    """The product of two row-major matrices of fp32."""
    result = torch.empty(len(a), b.shape[1])
    sizes = (len(a), b.shape[1], a.shape[1], threads)
    pointers = (ctypes.c_void_p(each.data_ptr()) for each in (a, b, result))
    compile_c(c_source(rung)).gemm(*pointers, *map(ctypes.c_long, sizes))
    return result


@cache
def c_source(rung: CRung) -> str:
    """The rung's file, with what it shares with others before it."""
    shared = (_FOLDER / "panel.h").read_text(encoding="utf-8") if rung.is_packed else ""
    return shared + (_FOLDER / rung.file).read_text(encoding="utf-8")
