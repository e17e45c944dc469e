"""Compiles kernels ahead for an NVIDIA H200; prints those that it heard of.

Of the first two each is told of only while the other is compiled too; the third is interrupted, and tried
again. What another thread starts meanwhile is started. A warning of torch's compiler ends nothing.
"""

import threading
import warnings
from contextlib import suppress
from typing import Any

import torch
import triton
import triton.language as tl
from h200 import H200
from triton.runtime import driver

from lockstep.kernels.triton.compile_ahead import compile_ahead

x = torch.zeros(1)
both = threading.Barrier(2, timeout=60)
told: list[int] = []
interrupts = [KeyboardInterrupt()]


@triton.jit
def add(x, NUMBER: tl.constexpr):
    tl.store(x, tl.load(x) + NUMBER)


def tell(*, src: Any, **_: Any) -> None:
    (number,) = src.constants.values()
    if number < 3:
        both.wait()
    elif interrupts:
        raise interrupts.pop()
    told.append(number)


def start(*numbers: int) -> None:
    for number in numbers:
        add[(1,)](x, NUMBER=number)


def start_elsewhere() -> None:
    started = []

    def launch() -> None:
        try:
            start(1)
        except AttributeError as error:  # this driver cannot
            started.append("launcher_cls" in str(error))

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert started == [True]


def warn_beside() -> None:
    """As torch's compiler, while a thread compiles as Triton 3.6 does: it saves and restores the filters."""
    inside, out = threading.Event(), threading.Event()

    def visit() -> None:
        with warnings.catch_warnings():
            inside.set()
            out.wait(60)

    thread = threading.Thread(target=visit)
    thread.start()
    inside.wait(60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out.set()
        thread.join()
        torch.autograd.Function()


def main() -> None:
    driver.set_active(H200())
    triton.knobs.compilation.listener = tell
    compile_ahead(lambda: start(1, 2, 1))
    compile_ahead(lambda: start(2))  # which is there
    compile_ahead(start_elsewhere)
    with suppress(KeyboardInterrupt):
        compile_ahead(lambda: start(3))
        raise AssertionError
    compile_ahead(lambda: start(3))
    warnings.simplefilter("error")
    compile_ahead(warn_beside)
    assert warnings.filters[0][0] == "error"
    print(sorted(told))


if __name__ == "__main__":
    main()
