"""Kernel launches as a CUDA graph, which starts them all at once."""

from __future__ import annotations

from collections.abc import Callable

import torch


def capture(launch: Callable[[], object], graph: bool) -> Callable[[], object]:
    """The launches as one CUDA graph if wanted, else one by one.

    They must have run before: that compiles the kernels, which cannot be captured.
    """
    if not graph:
        return launch
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, capture_error_mode="thread_local"):  # NCCL has threads of its own
        launch()
    replay: Callable[[], object] = captured.replay
    return replay
