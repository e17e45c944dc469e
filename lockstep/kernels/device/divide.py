"""Division of small numbers by constants, as a product: see `watch` for why."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def divide(x, D: tl.constexpr):
    """x // D and x % D of a block of numbers [0, 2**32 / D)."""
    if D & (D - 1) == 0:  # a shift, by which Triton also sees what lies side by side
        quotient, rest = x // D, x % D
    else:
        FACTOR: tl.constexpr = (2**32 + D - 1) // D
        quotient = tl.umulhi(x.to(tl.uint32), tl.full(x.shape, FACTOR, tl.uint32)).to(tl.int32)
        rest = x - quotient * D
    return quotient, rest
