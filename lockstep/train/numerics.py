"""The settings under which the same inputs give the same bits, made once before any work."""

from __future__ import annotations

import os

import torch

from lockstep.errors import SpecError


def prepare_device(name: str, threads: int) -> torch.device:
    """Choose the device and fix everything that would let stock kernels vary."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when CUDA starts
    if name == "cuda" and not torch.cuda.is_available():
        raise SpecError("--device cuda: torch sees no GPU here; use --device cpu or run `lockstep doctor`")
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms, without importing inductor
    # costs time and changes no result
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.set_flush_denormal(False)
    use_gpu = name == "cuda" or (name == "auto" and torch.cuda.is_available())
    return torch.device("cuda", torch.cuda.current_device()) if use_gpu else torch.device("cpu")
