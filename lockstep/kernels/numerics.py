"""Global torch settings under which equal inputs give equal bits: device, threads, determinism, precision."""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from lockstep.errors import SpecError
from lockstep.spec import Run

_MMAP_THRESHOLD, _TRIM_THRESHOLD, _TOP_PAD = -3, -1, -2  # of mallopt(3)


def prepare_device(
    name: str, threads: int, local_rank: int | None = None, tf32: bool = False
) -> torch.device:
    """Choose the device, and switch off everything that lets stock kernels give varying bits.

    This is called once, before any work. The workers of a host take its GPUs in turn; if there are more
    workers than GPUs, they share them.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when CUDA starts
    if name == "cuda" and not torch.cuda.is_available():
        raise SpecError("--device cuda: torch sees no GPU here; use --device cpu or run `lockstep doctor`")
    warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # a page of text, but torch falls back
    torch.set_num_threads(threads)
    _keep_memory()
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms, without importing inductor
    # costs time and changes no result
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.set_float32_matmul_precision("highest")  # on a CPU with AMX the others mean bf16
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.set_flush_denormal(False)
    use_gpu = name == "cuda" or (name == "auto" and torch.cuda.is_available())
    if use_gpu and local_rank is not None:
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device()) if use_gpu else torch.device("cpu")


def memory_format(run: Run) -> torch.memory_format:
    """The memory format of images and weights."""
    return torch.channels_last if run.train.channels_last else torch.contiguous_format


def to_device(model: nn.Module, device: torch.device, run: Run) -> nn.Module:
    """Move the model to its device, in the Run's memory format."""
    placed: nn.Module = model.to(device=device, memory_format=memory_format(run))  # type: ignore[call-overload]
    return placed


def seed_stream(device: torch.device, key: int) -> None:
    """Seed torch's generator for one lane or block, for random numbers that we cannot key by name."""
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(key)
    else:
        torch.default_generator.manual_seed(key)  # torch.manual_seed would visit every backend


def half_precision(device: torch.device, enabled: bool) -> torch.autocast:
    """Autocast to bf16, without its cache, which would keep the casts of old weights inside `plain_torch`."""
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled, cache_enabled=False)


@contextmanager
def plain_torch() -> Iterator[None]:
    """Run the block with the modes and defaults of a fresh process, then restore the caller's."""
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        stack.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(torch.device("cpu"))
        torch.set_default_dtype(torch.float32)
        yield


def _keep_memory() -> None:
    """Let malloc keep the memory that a step frees, which saves the next step's page faults on a CPU."""
    libc = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(libc, "mallopt"):
        libc.mallopt(_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_TOP_PAD, 64 << 20)
