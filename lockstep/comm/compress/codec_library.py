"""The codecs in C: compiled by the machine's compiler when they are first needed; without one there are none.

A call lets other Python threads run, as ctypes does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import LockstepError
from lockstep.native.c_library import EXACT, keep_library


@cache
def codec_library() -> ctypes.CDLL | None:
    """The library of `c/`; None if this machine cannot compile it."""
    source = "".join(path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("c/*.c")))
    try:
        return keep_library(source, EXACT)
    except (LockstepError, OSError):
        return None


def compresses_by(device: torch.device) -> str:
    """What computes the codecs of tensors on a device: c, or torch."""
    return "c" if device.type == "cpu" and codec_library() else "torch"


def call_codec(name: str, numbers: Sequence[int], *places: Tensor | int | ctypes.Array[Any]) -> None:
    """Call a function that takes numbers, and then where something lies: contiguous tensors, or addresses."""
    library = codec_library()
    assert library is not None
    found = [p.data_ptr() if isinstance(p, Tensor) else p for p in places]
    pointers = [ctypes.c_void_p(p) if isinstance(p, int) else p for p in found]
    getattr(library, name)(*map(ctypes.c_long, numbers), *pointers)
