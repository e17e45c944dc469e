"""The matrix that a convolution is: every row holds the filter where one result meets the image.

Rows repeat each other, shifted: a Toeplitz matrix, of blocks that are Toeplitz matrices. im2col multiplies by
it without storing its zeros: it copies what meets the filter instead.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from lockstep.lab.conv.conv_shape import ConvShape


def toeplitz_taps(shape: ConvShape) -> Tensor:
    """Of one channel and one filter: which of its values stands there, counted from 0, or -1 for none."""
    rows, columns = shape.result_size[2:]
    found = torch.full((rows * columns, shape.height * shape.width), -1)
    for p, q, r, s in product(range(rows), range(columns), range(shape.kernel), range(shape.kernel)):
        y = p * shape.stride + r * shape.dilation - shape.padding
        x = q * shape.stride + s * shape.dilation - shape.padding
        if 0 <= y < shape.height and 0 <= x < shape.width:
            found[p * columns + q, y * shape.width + x] = r * shape.kernel + s
    return found
