"""Exact integer division by constants, without what a GPU compiler gets wrong (`compiler_watch.py`)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def divide(x, D: tl.constexpr, LIMIT: tl.constexpr):
    """x // D and x % D for a block of integers in [0, LIMIT); undefined for others."""
    # A power of two becomes a shift, from which Triton also sees which addresses are contiguous. Large
    # numbers are not narrowed, and a 32-bit product would not be exact for them.
    if D & (D - 1) == 0 or LIMIT * D >= 2**32:
        quotient, rest = x // D, x % D
    else:
        FACTOR: tl.constexpr = (2**32 + D - 1) // D
        quotient = tl.umulhi(x.to(tl.uint32), tl.full(x.shape, FACTOR, tl.uint32)).to(tl.int32)
        rest = x - quotient * D
    return quotient, rest
