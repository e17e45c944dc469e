"""PyTorch's settings under which the same inputs give the same bits, and the device a run uses."""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import nn

from lockstep.errors import SpecError
from lockstep.spec import Run

_MMAP_THRESHOLD, _TRIM_THRESHOLD, _TOP_PAD = -3, -1, -2  # of mallopt(3)
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # the types of autocast by precision
# What torch's settings of fp32 hang on, wide ones first: one that is "none" has the value of a wider one.
_FP32_SETTINGS = (
    ("generic", "all"),
    *((backend, op) for op in ("all", "matmul", "conv", "rnn") for backend in ("cuda", "mkldnn")),
)


def check_device(name: str) -> None:
    """Refuse a GPU where there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise SpecError("--device cuda: torch sees no GPU here; use --device cpu or run `lockstep doctor`")


def prepare_device(
    name: str, threads: int, local_rank: int | None = None, tf32: bool = False
) -> torch.device:
    """Choose the device, and switch off everything that lets stock kernels give varying bits.

    This is called once, before any work. The workers of a host take its GPUs in turn; if there are more
    workers than GPUs, they share them.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when CUDA starts
    check_device(name)
    warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # a page of text, but torch falls back
    torch.set_num_threads(threads)
    _keep_memory()
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms, without importing inductor
    # costs time and changes no result
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    set_precision(tf32)
    torch.set_flush_denormal(False)
    use_gpu = name == "cuda" or (name == "auto" and torch.cuda.is_available())
    if use_gpu and local_rank is not None:
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    return current_gpu() if use_gpu else torch.device("cpu")


def current_gpu() -> torch.device:
    """The GPU of this worker, once `prepare_device` has chosen it."""
    return torch.device("cuda", torch.cuda.current_device())


def set_precision(tf32: bool) -> None:
    """fp32 as IEEE has it, or with TF32 in a GPU's matrix units; kernels that are not chosen by a timing."""
    torch.backends.cudnn.benchmark = False
    for setting in _FP32_SETTINGS:
        torch._C._set_fp32_precision_setter(*setting, "none")
    torch.set_float32_matmul_precision("highest")  # on a CPU with AMX the others mean bf16
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    for kind in HALVES:
        setattr(torch.backends.cuda.matmul, f"allow_{kind}_reduced_precision_reduction", False)


def failed_allocations(device: torch.device) -> int:
    """How often memory could not be had, also where a library went on with another kernel instead."""
    return int(torch.cuda.memory_stats(device).get("num_ooms", 0)) if device.type == "cuda" else 0


def check_allocations(device: torch.device, before: int) -> None:
    """Refuse what was computed while memory ran out: cuDNN then takes another kernel, and says nothing."""
    if failed_allocations(device) > before:
        raise torch.OutOfMemoryError("memory ran out for a kernel, and another one may give other bits")


def memory_format(run: Run) -> torch.memory_format:
    """The memory format of images and weights; with a grid contiguous, in which its kernels are asked."""
    is_last = run.train.channels_last and run.train.bands == run.train.slices == 1
    return torch.channels_last if is_last else torch.contiguous_format


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


def half_type(precision: str) -> torch.dtype | None:
    """The type to which a precision's matrix products and convolutions are cast; None: they stay in fp32."""
    return HALVES.get(precision)


def half_precision(device: torch.device, half: torch.dtype | None) -> torch.autocast:
    """Autocast to a type, without its cache, which would keep the casts of old weights in `plain_torch`."""
    return torch.autocast(device.type, half or torch.bfloat16, enabled=bool(half), cache_enabled=False)


@contextmanager
def plain_torch() -> Iterator[None]:
    """Run the block with the modes and defaults of a fresh process, then restore the caller's."""
    with ExitStack() as stack:
        stack.enter_context(precision_kept())
        stack.enter_context(warnings.catch_warnings())
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        stack.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
        stack.callback(torch.set_flush_denormal, sys.float_info.min / 2 == 0)  # no function tells
        memory: Any = torch.utils.deterministic
        stack.callback(setattr, memory, "fill_uninitialized_memory", memory.fill_uninitialized_memory)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device().type != "cpu":  # it would cost each call of torch a call of Python
            stack.enter_context(torch.device("cpu"))
        torch.set_default_dtype(torch.float32)
        yield


@contextmanager
def precision_kept() -> Iterator[None]:
    """Give back, at the end, what `set_precision` sets."""
    older, settings = _older_settings(), _fp32_settings()
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    flags = [
        (cudnn, "benchmark"),
        *((matmul, f"allow_{kind}_reduced_precision_reduction") for kind in HALVES),
    ]
    values = [getattr(part, name) for part, name in flags]
    try:
        yield
    finally:
        for (part, name), value in zip(flags, values, strict=True):
            setattr(part, name, value)
        _give_precision_back(older, settings)


def _fp32_settings() -> dict[tuple[str, str], str]:
    return {setting: torch._C._get_fp32_precision_getter(*setting) for setting in _FP32_SETTINGS}


def _older_settings() -> dict[str, Any]:
    """The older way to set the same; torch refuses to tell what was set in both ways."""
    found: dict[str, Any] = {}
    with suppress(RuntimeError):
        found["cudnn"] = torch.backends.cudnn.allow_tf32
    with suppress(RuntimeError):
        found["matmul"] = torch.get_float32_matmul_precision()
    return found


def _give_precision_back(older: dict[str, Any], settings: dict[tuple[str, str], str]) -> None:
    for setting in _FP32_SETTINGS:
        torch._C._set_fp32_precision_setter(*setting, "none")
    if "cudnn" in older:
        torch.backends.cudnn.allow_tf32 = older["cudnn"]
    if "matmul" in older:
        torch.set_float32_matmul_precision(older["matmul"])  # sets cuda.matmul.allow_tf32 too
    for setting, value in settings.items():
        if torch._C._get_fp32_precision_getter(*setting) != value:
            torch._C._set_fp32_precision_setter(*setting, value)


def _keep_memory() -> None:
    """Let malloc keep the memory that a step frees, which saves the next step's page faults on a CPU."""
    libc = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(libc, "mallopt"):
        libc.mallopt(_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_TOP_PAD, 64 << 20)
