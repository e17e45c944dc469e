"""Compiles two kernels ahead for an NVIDIA H200; each is told of only while the other is compiled too."""

import threading
from typing import Any

import torch
import triton
import triton.language as tl
from h200 import H200
from triton.runtime import driver

from lockstep.kernels.device.ahead import compile_ahead

both = threading.Barrier(2, timeout=60)
told: list[int] = []


@triton.jit
def add(x, NUMBER: tl.constexpr):
    tl.store(x, tl.load(x) + NUMBER)


def tell(*, src: Any, **_: Any) -> None:
    both.wait()
    told.extend(src.constants.values())


def main() -> None:
    driver.set_active(H200())
    triton.knobs.compilation.listener = tell
    x = torch.zeros(1)
    compile_ahead(lambda: [add[(1,)](x, NUMBER=number) for number in (1, 2, 1)])
    compile_ahead(lambda: add[(1,)](x, NUMBER=2))  # which is there
    print(sorted(told))


if __name__ == "__main__":
    main()
