"""Keyed random bits inside Triton kernels: the bits of `kernels/random.py`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def device_bits(key, counter):
    """64 random bits for each int64 counter under a key (splitmix64), as unsigned."""
    x = (counter.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15 + key.to(tl.uint64)
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def device_integers(key, counter, BOUND: tl.constexpr):
    """Integers in [0, BOUND)."""
    return ((device_bits(key, counter) >> 2) % BOUND).to(tl.int32)


@triton.jit
def keep_element(key, counter, P: tl.constexpr):
    """Whether dropout with probability P keeps an element."""
    uniform = (device_bits(key, counter) >> 40).to(tl.float32) * (1.0 / (1 << 24))
    return uniform >= P
