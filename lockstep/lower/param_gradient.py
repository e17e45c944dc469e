"""Gradients of parameters as autograd finds them: each with memory of its own, without the scale of the loss.

A gradient starts here: backward → lane tree → optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.spec.rule.loss_scale import LossScale

OnGradient = Callable[[int, Tensor], None]  # gets the number of a parameter and its gradient


def own_gradients(grads: Sequence[Tensor]) -> list[Tensor]:
    """Gradients that share no memory: autograd may give one tensor to two parameters, or expand one."""
    owned: list[Tensor] = []
    seen: set[int] = set()
    for grad in grads:
        shared = grad.data_ptr() in seen or 0 in grad.stride()
        owned.append(grad.clone(memory_format=torch.contiguous_format) if shared else grad)
        seen.add(grad.data_ptr())
    return owned


def take_gradient(
    early: OnGradient | None, forgets: bool, scale: LossScale | None, index: int, grad: Tensor | None
) -> Tensor | None:
    """A parameter's gradient without the scale of the loss, which `early` gets first; None: as it was."""
    if grad is None:
        return None
    found = grad.detach() * scale.inverse if scale else grad.detach()
    if early:
        early(index, found)
        return ghost(grad) if forgets else found if scale else None
    return found


def ghost(like: Tensor) -> Tensor:
    """Zeros of the same shape that take the memory of one element."""
    return like.new_zeros(()).expand(like.shape)
