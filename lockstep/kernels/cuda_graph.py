"""Captures kernel launches as a CUDA graph, after it has run them once."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress

import torch

from lockstep.kernels.cuda_stream import stream


def run_first(launch: Callable[[], object], device: torch.device, beside_others: bool = False) -> None:
    """Run `launch` once; on a GPU its Triton kernels are compiled before, in parallel.

    `beside_others` says that the other workers run the same, and that `launch` does not wait for them.
    """
    if device.type != "cuda":
        launch()
        return
    from lockstep.kernels.triton.compile_ahead import compile_ahead

    with torch.cuda.device(device):  # Triton launches on the thread's current GPU
        with one_compiles_first() if beside_others else nullcontext():
            compile_ahead(launch)
        launch()


def capture(launch: Callable[[], object], device: torch.device, graph: bool) -> Callable[[], object]:
    """A function that repeats the launches: as one CUDA graph if `graph`, else one by one.

    `run_first` must have run them before, because kernels cannot be compiled during a capture.
    """
    if not graph:
        return launch
    captured = torch.cuda.CUDAGraph()
    with (
        torch.cuda.device(device),
        torch.cuda.graph(
            captured, stream=stream(device), capture_error_mode="thread_local"
        ),  # NCCL has threads
    ):
        launch()
    replay: Callable[[], object] = captured.replay
    return replay


@contextmanager
def one_compiles_first() -> Iterator[None]:
    """Let one worker of a host into the block first, and the others once it has left.

    The workers of a host compile the same kernels. So the first one compiles them, and the others find them
    in the cache on disk. The lock is on the workers' parent process, and ends with the worker that holds it.
    """
    family = -1
    with suppress(OSError):  # without the lock, each worker compiles for itself
        family = os.open(f"/proc/{os.getppid()}", os.O_RDONLY)
        try:
            fcntl.flock(family, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(family, fcntl.LOCK_SH)
    try:
        yield
    finally:
        if family >= 0:
            with suppress(OSError):
                fcntl.flock(family, fcntl.LOCK_UN)  # a process that was forked inside holds it, too
            os.close(family)
