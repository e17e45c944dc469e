"""Global average pooling in Triton, the mean over an image's pixels before a classifier, and its gradient."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.triton.norm.norm_forward import Norm, border_of, image_place

_SAMPLES, _ROWS, _CHANNELS = 4, 64, 64  # of a block


@triton.jit
def _average(
    y, out, total, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    mask = (n < total)[:, None] & (c < C)[None, :]
    value = tl.zeros((BN, BC), tl.float32)
    for pixel in range(H * W):
        place = image_place(n * (H * W) + pixel, c, H, W, C, BH, BW)
        value += tl.load(y + place, mask=mask, other=0.0).to(tl.float32)
    value = value * (1.0 / (H * W))
    tl.store(out + n[:, None] * C + c[None, :], value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _spread(
    grad, y, g, total, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr,
    RELU: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    q = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    mask = (q < total)[:, None] & (c < C)[None, :]
    place = (q // (H * W))[:, None] * C + c[None, :]
    value = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32) * (1.0 / (H * W))
    if RELU:
        seen = tl.load(y + image_place(q, c, H, W, C, BH, BW), mask=mask, other=0.0)
        value = tl.where(seen > 0, value, 0.0)
    tl.store(g + q[:, None] * C + c[None, :], value.to(g.dtype.element_ty), mask=mask)


def average(norm: Norm, y: Tensor, out: Tensor) -> None:
    """Average y [N, H, W, C], the output of a norm inside its border, over pixels to out [N, 1, 1, C]."""
    border = border_of(norm, y)
    _average[(triton.cdiv(len(y), _SAMPLES), triton.cdiv(norm.channels, _CHANNELS))](
        y, out, len(y), H=norm.height, W=norm.width, C=norm.channels, BH=border[0], BW=border[1],
        BN=_SAMPLES, BC=_CHANNELS, enable_fp_fusion=False,
    )  # fmt: skip


def spread(norm: Norm, grad: Tensor, y: Tensor, g: Tensor) -> None:
    """Spread grad [N, 1, 1, C] over pixels to g [N, H, W, C], the gradient of the norm's ReLU's input."""
    border, total = border_of(norm, y), len(y) * norm.height * norm.width
    _spread[(triton.cdiv(total, _ROWS), triton.cdiv(norm.channels, _CHANNELS))](
        grad, y, g, total, H=norm.height, W=norm.width, C=norm.channels, BH=border[0], BW=border[1],
        RELU=norm.relu, BR=_ROWS, BC=_CHANNELS, enable_fp_fusion=False,
    )  # fmt: skip
