"""Values on which another order of summation shows: sums that cancel, so that what is left is rounding."""

from __future__ import annotations

from torch import Tensor

from lockstep.lower.fixed_lane import fixed_values
from lockstep.parallel.split.way import FORWARD, INPUT


def probe_values(name: str, like: Tensor) -> Tensor:
    """Fixed values whose sums have to be rounded: products, since fixed values themselves lie on a grid."""
    return fixed_values(name, like).mul_(fixed_values(f"{name} again", like))


def cancel(part: str, x: Tensor | None, weight: Tensor, dy: Tensor | None, transposed: bool) -> None:
    """Change values in place so that the sums of one part of a layer's work cancel.

    Half of what is summed over is the other half, with the other sign. In bf16 a result is rounded so much
    that two orders of summation seldom differ in it, unless it is as small as their errors.
    """
    inputs, outputs = (0, 1) if transposed else (1, 0)  # the weight's dimensions
    if part == FORWARD:
        _mirror(weight, inputs, -1.0)
        _mirror(x, 1, 1.0)
    elif part == INPUT:
        _mirror(weight, outputs, -1.0)
        _mirror(dy, 1, 1.0)
    else:
        dim = 0 if dy is not None and (len(dy) > 1 or dy.dim() < 3) else 2
        _mirror(dy, dim, -1.0)
        _mirror(x, dim, 1.0)


def _mirror(tensor: Tensor | None, dim: int, sign: float) -> None:
    """Make the second half along a dimension the first one times a sign."""
    half = tensor.shape[dim] // 2 if tensor is not None else 0
    if tensor is not None and half:
        tensor.narrow(dim, half, half).copy_(tensor.narrow(dim, 0, half) * sign)
