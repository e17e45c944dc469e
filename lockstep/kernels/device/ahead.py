"""Kernels compiled beside each other, before a first step would compile them one after another."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton
from triton.runtime.jit import JITFunction

_MOST_THREADS = 16


def compile_ahead(launch: Callable[[], object]) -> None:
    """Compile all kernels that `launch` starts in Triton, but start none: what it computes means nothing.

    A kernel that cannot be compiled says so where it is started.
    """
    threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    with (
        ThreadPoolExecutor(threads) as executor,
        triton.AsyncCompileMode(executor, ignore_errors=True),
        nothing_started(),
    ):
        launch()


@contextmanager
def nothing_started() -> Iterator[None]:
    """Kernels are compiled where they would be started."""
    own: Any = JITFunction.run

    def compile_only(self: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        return own(self, *args, warmup=True, **options)

    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = own
