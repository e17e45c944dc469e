"""Kernels compiled beside each other, before a first step would compile them one after another."""

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
    """Compile all kernels that `launch` starts in Triton, but start none: what it computes means nothing.

    A kernel that cannot be compiled says so where it is started.
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
    """Kernels of this thread are compiled where they would be started."""
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
    """What failed or was not awaited is compiled again where it is started."""
    for kernels, *_ in function.device_caches.values():
        for key in [key for key, kernel in list(kernels.items()) if isinstance(kernel, triton.FutureKernel)]:
            kernels.pop(key, None)
