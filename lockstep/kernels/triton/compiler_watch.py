"""Refuses kernels that the GPU's compiler is known to get wrong.

If LLVM knows that the operands of a division are small, it narrows the division and the arithmetic on its
result to 8 bits, and packs two such additions into one 16x2-bit instruction. ptxas 12.8, which comes with
Triton, loses the constant of such an addition if only 8 bits of the result are used. The kernel then reads
wrong values. Kernels in which this was found use `exact_division.divide`, whose code is not narrowed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton

from lockstep.errors import ModelError

_PACKED = re.compile(r"\.[su]16x2\b")


def watch_compiler() -> None:
    """Check every kernel of Lockstep from now on, whether it is compiled or found in Triton's cache."""
    knobs = triton.knobs.compilation
    if not isinstance(knobs.listener, _Watch):
        knobs.listener = _Watch(knobs.listener)


def check_code(name: str, ptx: str) -> None:
    if _PACKED.search(ptx):
        raise ModelError(
            f"the compiler in Triton {triton.__version__} may get the kernel {name} wrong for these shapes: "
            "train with -o kernels.set=stock (and train.sync_norm=false), use a trained run with --device cpu"
        )


class _Watch:
    """A listener of Triton's compiler that checks our kernels; it calls the previous listener first."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, *, src: Any, metadata_group: Mapping[str, str], **facts: Any) -> None:
        if self._before is not None:
            self._before(src=src, metadata_group=metadata_group, **facts)
        if str(getattr(getattr(src, "fn", None), "__module__", "")).startswith("lockstep."):
            code = next((path for path in metadata_group.values() if path.endswith(".ptx")), None)
            if code is None:
                raise ModelError(
                    "Triton's cache has no code of its kernels to check: unset TRITON_STORE_BINARY_ONLY and "
                    "remove the cache (~/.triton/cache, or TRITON_CACHE_DIR)"
                )
            check_code(src.name, Path(code).read_text())
