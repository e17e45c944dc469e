"""PyTorch's DistributedDataParallel and its hooks that send less, for slow_links.py and hook_accuracy.py."""

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

RANK = 4
HOOKS = ("DDP", "DDP bf16", f"DDP PowerSGD {RANK}")
START = 2  # the first step that PowerSGD may compress: DDP makes its buckets anew after step 0


def make_ddp(model: nn.Module, hook: str, start: int = START) -> DistributedDataParallel:
    """The model over the default process group, with one of the HOOKS; all else as PyTorch has it.

    PowerSGD keeps its defaults, error feedback and warm start, but for its rank and the step it begins with.
    It gets one bucket: over gloo the messages of several get mixed up, and the workers fail.
    """
    found = DistributedDataParallel(model, bucket_cap_mb=1024 if hook == HOOKS[2] else None)
    if hook == HOOKS[1]:
        found.register_comm_hook(None, bf16_hook)
    elif hook == HOOKS[2]:
        state = PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=start)
        found.register_comm_hook(state, powerSGD_hook)
    return found


def bf16_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """PyTorch's own, which DDP refuses over gloo by its name; gloo has learned to sum bf16 since."""
    return default_hooks.bf16_compress_hook(None, bucket)


def sent_bytes(shapes: Sequence[Sequence[int]], hook: str, workers: int) -> float:
    """What a worker sends in a step, by a ring: 2 (W - 1) / W of what it has to sum."""
    return 2 * (workers - 1) / workers * sum(_bytes(shape, hook) for shape in shapes)


def _bytes(shape: Sequence[int], hook: str) -> float:
    size, factors = prod(shape), RANK * (shape[0] + prod(shape) // shape[0])
    if hook == HOOKS[2] and 2 * factors < size:  # its min_compression_rate
        return 4.0 * factors
    return (2.0 if hook == HOOKS[1] else 4.0) * size
