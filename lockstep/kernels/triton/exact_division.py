"""Division of small numbers by constants, as a product: see `watch` for why."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def divide(x, D: tl.constexpr, LIMIT: tl.constexpr):
    """x // D and x % D of a block of numbers [0, LIMIT); for others, anything."""
    # Powers of two are shifts, by which Triton also sees what lies side by side. Large numbers are not
    # narrowed, and a product of 32 bits is not exact for them.
    if D & (D - 1) == 0 or LIMIT * D >= 2**32:
        quotient, rest = x // D, x % D
    else:
        FACTOR: tl.constexpr = (2**32 + D - 1) // D
        quotient = tl.umulhi(x.to(tl.uint32), tl.full(x.shape, FACTOR, tl.uint32)).to(tl.int32)
        rest = x - quotient * D
    return quotient, rest
