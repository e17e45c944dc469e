"""Strided 1×1 convolutions whose weight gradient oneDNN computes outside its memory, and the way around.

For images with channels last and fewer channels than a block, oneDNN 3.12 keeps every stride-th pixel in too
small a buffer, and so damages the heap of the process: https://github.com/uxlfoundation/oneDNN/issues/6035.
Other pixels are no part of the sum, so the same convolution without the stride, of these pixels alone, is
equal. Uncut layers of stock PyTorch have this fault as well.
"""

from __future__ import annotations

from torch import Tensor

from lockstep.parallel.split.layers.row_buffer import dense_as, is_channels_last

FULL_BLOCK = 16  # channels; 8 without AVX-512


def is_unsafe(x: Tensor, dy: Tensor, stride: tuple[int, int]) -> bool:
    """Whether a call for the weight gradient would write outside its memory.

    The convolution, normal or transposed, has a 1×1 kernel, one group and no padding.
    """
    wide, narrow = sorted((x, dy), key=_num_pixels, reverse=True)  # windows move over the wide side
    rows, columns = narrow.shape[2:]
    return (
        stride != (1, 1)
        and wide.device.type == "cpu"
        and wide.shape[1] < FULL_BLOCK
        and wide.shape[2:] == (rows * stride[0], columns * stride[1])
        and (is_channels_last(wide) or is_channels_last(narrow))  # with one channel, `wide` does not tell
    )


def under_windows(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Both with the pixels that lie under windows, where they fill the wide side; the other has no more."""
    rows, columns = min(x.shape[2:], dy.shape[2:])
    x, dy = (
        dense_as(side[:, :, :: side.shape[2] // rows, :: side.shape[3] // columns], side) for side in (x, dy)
    )
    return x, dy


def _num_pixels(image: Tensor) -> int:
    return image.shape[2] * image.shape[3]
