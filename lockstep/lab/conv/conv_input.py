"""What algorithms share about their input: in which precision they compute, and what they refuse."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lockstep.errors import LockstepError
from lockstep.lab.conv.conv_shape import ConvShape

_MOST_GIB = 4.0


class ConvRefused(LockstepError):
    """An algorithm does not admit a convolution; the text names it, the value and why."""


def work_precision(like: Tensor) -> torch.dtype:
    """fp32 for what is stored in fewer bits, float64 for float64."""
    return torch.promote_types(like.dtype, torch.float32)


def need_fp32(name: str, given: Tensor) -> None:
    """Refuse tensors that C code cannot read."""
    if given.dtype != torch.float32:
        kind = str(given.dtype).removeprefix("torch.")
        raise ConvRefused(f"{name}: precision {kind} must be fp32 on a CPU: its C code has no other numbers")


def need_memory(name: str, what: str, values: float, given: Tensor) -> None:
    """Refuse to fill a computer's memory; a GPU says by itself when it has no more."""
    gib = 4.0 * values / 2**30
    if given.device.type == "cpu" and gib > _MOST_GIB:
        raise ConvRefused(f"{name}: {what} of {gib:.1f} GiB: on a CPU the most is {_MOST_GIB:.0f} GiB")


def split_groups(planes: Tensor, axis: int, groups: int) -> Tensor:
    """The axis of channels as two: groups, and the channels of a group."""
    return torch.unflatten(planes, axis, (groups, -1))


def pad_images(shape: ConvShape, images: Tensor) -> Tensor:
    """Images with their zeros around them, in one piece of memory."""
    return functional.pad(images, [shape.padding] * 4).contiguous()
