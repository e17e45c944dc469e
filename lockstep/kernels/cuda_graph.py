"""Captures kernel launches as a CUDA graph, which starts them all at once."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress

import torch

from lockstep.kernels.cuda_stream import stream


def run_first(launch: Callable[[], object], device: torch.device, beside_others: bool = False) -> None:
    """Compile the kernels of what is launched, on a GPU beside each other, and run it once.

    `beside_others`: the other workers do the same, and none waits for another in it.
    """
    if device.type != "cuda":
        launch()
        return
    from lockstep.kernels.triton.compile_ahead import compile_ahead

    with torch.cuda.device(device):  # Triton starts kernels where the thread is
        with one_compiles_first() if beside_others else nullcontext():
            compile_ahead(launch)
        launch()


def capture(launch: Callable[[], object], device: torch.device, graph: bool) -> Callable[[], object]:
    """The launches as one CUDA graph if wanted, else one by one.

    They must have run before, by `run_first`: that compiles the kernels, which cannot be captured.
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
    """Of the children of one process that come here, one goes in at once, and the others when it is out.

    The workers of a host compile the same kernels: so the first does, and the others find them on disk. One
    that dies inside lets the others in.
    """
    family = -1
    with suppress(OSError):  # where a process cannot be locked, each compiles for itself
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
                fcntl.flock(family, fcntl.LOCK_UN)  # a child that was forked inside has it too
            os.close(family)
