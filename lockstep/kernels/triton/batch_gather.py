"""Gathers and augments a step's images on the device, bit for bit as `data/augment.py` does on the host.

The path of a batch on the device: store → order → augment → layer. The bits are those of `Augment.apply`.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.triton.keyed_bits import device_integers

_BLOCK = 1024


@triton.jit
def _gather(
    images, labels, places, order, cursor, bad, keys, scale, shift, out, out_labels, count,
    IMAGE: tl.constexpr, LABEL: tl.constexpr,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr,
    CROP: tl.constexpr, FLIP: tl.constexpr, CUTOUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """IMAGE and LABEL are the strides from one image, and from one label, to the next."""
    sample = tl.program_id(0)
    step = tl.load(cursor)
    spot = step.to(tl.int64) * count + sample
    place, number = tl.load(places + spot), tl.load(order + spot)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    good = tl.load(bad) == 0  # otherwise the images of the failed step stay in place
    inside = (i < C * H * W) & good
    c, pixel = i % C, i // C
    y, x = pixel // W, pixel % W
    row, col = y, x
    if CROP > 0:
        row = y + device_integers(tl.load(keys), number, 2 * CROP + 1) - CROP
        col = x + device_integers(tl.load(keys + 1), number, 2 * CROP + 1) - CROP
    if FLIP:
        col = tl.where(device_integers(tl.load(keys + 2), number, 2) == 1, W - 1 - col, col)
    known = inside & (row >= 0) & (row < H) & (col >= 0) & (col < W)
    value = tl.load(images + place * IMAGE + (c * H + row) * W + col, mask=known, other=0)
    value = value.to(tl.float32) * tl.load(scale + c, mask=inside, other=0.0)
    value = value - tl.load(shift + c, mask=inside, other=0.0)
    if CUTOUT > 0:  # as floats, exact here: a compiler would do it in 8 bits (`compiler_watch.py`)
        top = device_integers(tl.load(keys + 3), number, H).to(tl.float32) - CUTOUT // 2
        left = device_integers(tl.load(keys + 4), number, W).to(tl.float32) - CUTOUT // 2
        down, right = y.to(tl.float32) - top, x.to(tl.float32) - left
        hole = (down >= 0) & (down < CUTOUT) & (right >= 0) & (right < CUTOUT)
        value = tl.where(hole, 0.0, value)
    target = ((sample * (H + 2 * BH) + y + BH) * (W + 2 * BW) + x + BW) * C + c
    tl.store(out + target, value.to(out.dtype.element_ty), mask=inside)
    if tl.program_id(1) == 0:
        tl.store(out_labels + sample, tl.load(labels + place * LABEL).to(tl.int32), mask=good)


@dataclass(frozen=True)
class Move:
    """How augmentation moves pixels: the largest shift of a crop, whether it flips, the side of a cutout."""

    crop: int = 0
    flip: bool = False
    cutout: int = 0


def gather_batch(
    images: Tensor, labels: Tensor, places: Tensor, order: Tensor, cursor: Tensor, bad: Tensor, keys: Tensor,
    normal: tuple[Tensor, Tensor], out: Tensor, out_labels: Tensor, move: Move,
    border: tuple[int, int] = (0, 0),
) -> None:  # fmt: skip
    """Write the images of step `cursor` to out [count, H, W, C], inside its border, unless a step was `bad`.

    order [steps, count] holds the numbers of the samples, and places [steps, count] their indices in images
    [·, C, H, W] and labels. Each image must be contiguous, but there may be gaps between images. keys holds
    the keys of the epoch: crop row, crop column, flip, cutout row, cutout column.
    """
    _, channels, height, width = images.shape
    count = len(out_labels)
    grid = (count, triton.cdiv(channels * height * width, _BLOCK))
    _gather[grid](
        images, labels, places, order, cursor, bad, keys, *normal, out, out_labels, count,
        IMAGE=images.stride(0), LABEL=labels.stride(0),
        C=channels, H=height, W=width, BH=border[0], BW=border[1],
        CROP=move.crop, FLIP=move.flip, CUTOUT=move.cutout, BLOCK=_BLOCK, enable_fp_fusion=False,
    )  # fmt: skip
