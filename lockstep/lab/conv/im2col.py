"""im2col: what a filter sees at every place is copied into a column, and the convolution is one product.

The copy is R² times the image, but the product is the library's fastest routine: this is how the first
frameworks convolved. Drawn as a matrix times the image, it is a Toeplitz matrix (see toeplitz.py).
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from lockstep.lab.conv.conv_input import need_memory, split_groups
from lockstep.lab.conv.conv_shape import ConvPass, ConvShape


def im2col(shape: ConvShape, which: ConvPass, first: Tensor, second: Tensor) -> Tensor:
    """Any of the three passes: a product with the columns, or columns from a product, which are added up."""
    groups, places = shape.groups, prod(shape.result_size[2:])
    need_memory("im2col + GEMM", "columns", shape.batch * shape.in_channels * shape.kernel**2 * places, first)
    if which is ConvPass.DATA:
        weight = second.reshape(groups, shape.out_channels // groups, -1)
        gradient = split_groups(first.flatten(2), 1, groups)
        columns = weight.transpose(1, 2) @ gradient  # [N, G, C / G × R², P × Q]
        return functional.fold(columns.flatten(1, 2), shape.image_size[2:], **_window(shape))
    columns = split_groups(functional.unfold(first, **_window(shape)), 1, groups)
    if which is ConvPass.FORWARD:
        return (second.reshape(groups, shape.out_channels // groups, -1) @ columns).reshape(shape.result_size)
    gradient = split_groups(second.flatten(2), 1, groups)
    rows, columns = (each.permute(1, 2, 0, 3).flatten(2) for each in (gradient, columns))  # of all images
    return torch.cat([one @ two.T for one, two in zip(rows, columns, strict=True)]).view(shape.weight_size)


def _window(shape: ConvShape) -> dict[str, int]:
    return {
        "kernel_size": shape.kernel,
        "dilation": shape.dilation,
        "padding": shape.padding,
        "stride": shape.stride,
    }
