"""Compiles a kernel that adds 16x2 bits for an NVIDIA H200, which needs no GPU; prints what is said of it.

Twice: from Triton's cache it is no better.
"""

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lockstep.errors import ModelError
from lockstep.kernels.device.watch import watch_compiler


@triton.jit
def add(x):
    pair = tl.load(x + tl.arange(0, 32))
    both = tl.inline_asm_elementwise(
        "add.s16x2 $0, $1, $1;", "=r,r", [pair], dtype=tl.int32, is_pure=True, pack=1
    )
    tl.store(x + tl.arange(0, 32), both)


def main() -> None:
    watch_compiler()
    for module in ("elsewhere", "lockstep.kernels.device.new", "lockstep.kernels.device.new"):
        add.__module__ = module
        try:
            triton.compile(ASTSource(add, {"x": "*i32"}), target=GPUTarget("cuda", 90, 32))
            print("taken")
        except ModelError as error:
            print(error)


if __name__ == "__main__":
    main()
