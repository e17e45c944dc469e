"""What compilers get wrong: division without narrow numbers, and kernels that are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from images import DEVICE

from lockstep.kernels.triton.exact_division import divide


@triton.jit
def _divide(x, out, D: tl.constexpr, LIMIT: tl.constexpr, B: tl.constexpr):
    at = tl.arange(0, B)
    quotient, rest = divide(tl.load(x + at), D, LIMIT)
    tl.store(out + at, quotient)
    tl.store(out + B + at, rest)


@pytest.mark.parametrize("by", [1, 3, 6, 7, 8, 9, 24, 49, 64, 641, 2304, 65537, 81675])
@pytest.mark.parametrize("taps", [9, 2**31])  # in the range of products, or past it
def test_division_by_a_constant(by: int, taps: int) -> None:
    last = min(taps * by, 2**31) - 1
    near = torch.arange(1000, dtype=torch.int64)
    x = torch.cat([near, (last - near), near * by, near * by + by - 1])
    x = x.clamp(0, last)[:4096]
    x = torch.cat([x, x[: 4096 - len(x)]]).to(torch.int32).to(DEVICE)
    out = torch.zeros(2, 4096, dtype=torch.int32, device=DEVICE)
    _divide[(1,)](x, out, D=by, LIMIT=last + 1, B=4096)
    assert torch.equal(out[0], x // by)
    assert torch.equal(out[1], x % by)


def test_a_kernel_with_packed_numbers_is_refused(tmp_path: Path) -> None:
    first, *others = compile_packed(tmp_path)
    assert first == "taken"  # no kernel of ours
    assert len(others) == 3
    told = "kernel add wrong for these shapes: train with -o kernels.set=stock"
    assert all(told in line for line in others)


def test_a_kernel_without_code_is_refused(tmp_path: Path) -> None:
    _, *others = compile_packed(tmp_path, TRITON_STORE_BINARY_ONLY="1")
    assert len(others) == 3 and all("unset TRITON_STORE_BINARY_ONLY" in line for line in others)


def compile_packed(cache: Path, **settings: str) -> list[str]:
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache), **settings}
    script = Path(__file__).parent / "packed.py"
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()
