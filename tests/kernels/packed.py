"""Compiles a kernel that adds 16x2 bits for an NVIDIA H200; prints what is said of it.

Twice: from Triton's cache it is no better. Then ahead, where nothing is said before it is started.
"""

import torch
import triton
import triton.language as tl
from h200 import H200
from triton.runtime import driver

from lockstep.errors import ModelError
from lockstep.kernels.triton.compile_ahead import compile_ahead, nothing_started
from lockstep.kernels.triton.compiler_watch import watch_compiler


@triton.jit
def add(x):
    pair = tl.load(x + tl.arange(0, 32))
    both = tl.inline_asm_elementwise(
        "add.s16x2 $0, $1, $1;", "=r,r", [pair], dtype=tl.int32, is_pure=True, pack=1
    )
    tl.store(x + tl.arange(0, 32), both)


def main() -> None:
    watch_compiler()
    driver.set_active(H200())
    x = torch.zeros(32, dtype=torch.int32)
    for module in ("elsewhere", "lockstep.kernels.triton.new", "lockstep.kernels.triton.new"):
        add.__module__ = module
        add.device_caches.clear()
        try:
            with nothing_started():
                add[(1,)](x)
            print("taken")
        except ModelError as error:
            print(error)
    add.device_caches.clear()
    compile_ahead(lambda: add[(1,)](x))
    try:
        add[(1,)](x)
    except ModelError as error:
        print(error)


if __name__ == "__main__":
    main()
