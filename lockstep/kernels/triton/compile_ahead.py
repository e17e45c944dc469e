"""Compiles the Triton kernels of a step in parallel, before the first step needs them."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

_MOST_THREADS = 16
_one_at_a_time = threading.RLock()


def compile_ahead(launch: Callable[[], object]) -> None:
    """Compile all Triton kernels that `launch` would start, without starting them; its results are garbage.

    A kernel that cannot be compiled raises its error later, when it is started.
    """
    executor = ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _MOST_THREADS))
    with warnings.catch_warnings():
        # Filters are the process's: threads in which Triton 3.6 compiles save and restore them in any order,
        # so that what `launch` ignores (torch's compiler warns of itself) could be an error in the middle.
        warnings.simplefilter("ignore")
        try:
            copy_context().run(_compile, launch, executor)  # Triton's mode ends with the context
        finally:
            executor.shutdown(wait=False, cancel_futures=True)


def _compile(launch: Callable[[], object], executor: Executor) -> None:
    with (
        nothing_started(),
        torch.autograd.set_multithreading_enabled(False),  # a backward pass stays in this thread
        triton.AsyncCompileMode(executor, ignore_errors=True),
    ):
        launch()


@contextmanager
def nothing_started() -> Iterator[None]:
    """Inside the block, launches of this thread compile their kernels but do not start them."""
    with _one_at_a_time:
        own: Any = JITFunction.run
        owner, seen = threading.get_ident(), {}

        def compile_only(self: Any, *args: Any, warmup: bool, **options: Any) -> Any:
            if threading.get_ident() != owner:
                return own(self, *args, warmup=warmup, **options)
            seen[id(self)] = self
            return own(self, *args, warmup=True, **options)

        JITFunction.run = compile_only
        try:
            yield
        finally:
            JITFunction.run = own
            for function in seen.values():
                _forget_unfinished(function)


def _forget_unfinished(function: Any) -> None:
    """Drop kernels that failed or were not awaited, so that they are compiled again when they are started."""
    for kernels, *_ in function.device_caches.values():
        for key in [key for key, kernel in list(kernels.items()) if isinstance(kernel, triton.FutureKernel)]:
            kernels.pop(key, None)
