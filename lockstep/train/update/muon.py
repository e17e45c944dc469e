"""Muon: updates of matrices by their momentum, orthogonalized by five steps of Newton and Schulz.

A matrix is one of output channels × the rest. One after another is computed at its own shape, in IEEE fp32 on
every device, so nothing depends on who computes which.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lockstep.comm.tree import tree_sum
from lockstep.kernels.numerics import precision_kept, set_precision
from lockstep.runs.train_state import Memory
from lockstep.spec.param_group import ParamGroup
from lockstep.train.clip import chunk_sums
from lockstep.train.optimizer import find_moves

_STEPS, _FACTORS = 5, (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024
_LEAST_NORM = 1e-7


@torch.no_grad()
def update_matrices(
    group: ParamGroup,
    lr: float,
    params: list[Tensor],
    grads: list[Tensor],
    memory: Memory,
    moves: Mapping[str, Tensor],
) -> None:
    """Change matrices and memory in place, by moves that are known already, so that nothing can fail."""
    if not params:
        return
    find_moves(group.optimizer, 0, grads, memory)
    if group.optimizer.weight_decay:
        torch._foreach_mul_(params, 1.0 - lr * group.optimizer.weight_decay)
    for name, param in zip(group.names, params, strict=True):
        param.sub_(moves[name].view(param.shape).mul(lr))


@torch.no_grad()
def find_move(momentum: Tensor, shape: Sequence[int]) -> Tensor:
    """What is subtracted from a whole parameter of this shape, times the learning rate."""
    rows, cols = shape[0], math.prod(shape[1:])
    with _ieee(momentum.device):
        found = orthogonalize(momentum.reshape(rows, cols))
    return found.mul_(max(1.0, rows / cols) ** 0.5).view(*shape)


def orthogonalize(matrix: Tensor) -> Tensor:
    """Nearly U Vᵀ of a matrix U S Vᵀ: its singular values become about 1."""
    wide = matrix.t() if matrix.shape[0] > matrix.shape[1] else matrix
    x = wide.to(move_type(matrix)).contiguous()
    norm = tree_sum(chunk_sums(x)).double().sqrt().to(x.dtype)
    x = x / norm.clamp(min=_LEAST_NORM)
    a, b, c = _FACTORS
    for _ in range(_STEPS):
        gram = x @ x.t()
        x = x * a + (gram * b + (gram @ gram) * c) @ x
    return (x.t() if wide is not matrix else x).contiguous()


def move_type(tensor: Tensor) -> torch.dtype:
    """In which a tensor's move is computed."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


@contextmanager
def _ieee(device: torch.device) -> Iterator[None]:
    """Products in fp32 as IEEE has it, whatever train.precision is."""
    if device.type == "cpu":
        yield
        return
    with precision_kept():
        set_precision(False)
        yield
