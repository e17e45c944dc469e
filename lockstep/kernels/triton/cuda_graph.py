"""Captures kernel launches as a CUDA graph, so that one call starts them all."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lockstep.kernels.triton.streams import stream


def run_first(launch: Callable[[], object], device: torch.device) -> None:
    """Compile the kernels of what is launched, on a GPU beside each other, and run it once."""
    if device.type == "cuda":
        from lockstep.kernels.triton.compile_ahead import compile_ahead

        compile_ahead(launch)
    launch()


def capture(launch: Callable[[], object], graph: bool) -> Callable[[], object]:
    """The launches as one CUDA graph if wanted, else one by one.

    They must have run before, by `run_first`: that compiles the kernels, which cannot be captured.
    """
    if not graph:
        return launch
    captured, main = torch.cuda.CUDAGraph(), stream(torch.device("cuda", torch.cuda.current_device()))
    with torch.cuda.graph(captured, stream=main, capture_error_mode="thread_local"):  # NCCL has threads
        launch()
    replay: Callable[[], object] = captured.replay
    return replay
