"""Which PyTorch calls compute a convolution and its gradients, for `custom_op.py`; groups one by one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

_Options = tuple[Sequence[int], Sequence[int], Sequence[int], int]  # stride, padding, dilation, groups
_FEW, _WIDE = 4, 32  # at most this many groups, each of at least this many channels, run one by one


def stock_conv(x: Tensor, w: Tensor, options: _Options) -> Tensor:
    """A convolution without bias; a few wide groups run as separate convolutions, which is faster."""
    x, w = lying_last(x), lying_last(w)
    if not _takes_apart(w, options):
        return F.conv2d(x, w, None, *options)
    groups = options[3]
    parts = zip(x.chunk(groups, 1), w.chunk(groups), strict=True)
    return torch.cat([stock_conv(a, b, (*options[:3], 1)) for a, b in parts], 1)


def stock_conv_backward(g: Tensor, x: Tensor, w: Tensor, options: _Options, which: int) -> Tensor:
    """The gradient of the input (`which` = 0) or of the weight (`which` = 1)."""
    g, x, w = lying_last(g), lying_last(x), lying_last(w)
    if _takes_apart(w, options):
        groups = options[3]
        parts = zip(g.chunk(groups, 1), x.chunk(groups, 1), w.chunk(groups), strict=True)
        alone = *options[:3], 1
        found = [stock_conv_backward(a, b, c, alone, which) for a, b, c in parts]
        return lying_last(torch.cat(found, 0 if which else 1))
    (stride, padding, dilation, groups), wanted = options, [which == 0, which == 1, False]
    grads: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
        g, x, w, None, stride, padding, dilation, False, [0, 0], groups, wanted
    )
    return lying_last(grads[which])


def _takes_apart(w: Tensor, options: _Options) -> bool:
    return 1 < options[3] <= _FEW and w.shape[1] >= _WIDE


def lying_last(x: Tensor) -> Tensor:
    """x in channels-last format, copied only if it has another format.

    A tensor with one channel can have the strides of either format, and torch chooses its kernels by strides.
    """
    x = x.contiguous(memory_format=torch.channels_last)
    _, channels, height, width = x.shape
    return x.as_strided(x.shape, (height * width * channels, 1, width * channels, channels))
