"""Direct: the sum that defines a convolution, as loops in C. It needs no memory but the tensors."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lockstep.lab.conv.conv_input import need_fp32, pad_images
from lockstep.lab.conv.conv_shape import ConvPass, ConvShape
from lockstep.native.c_library import compile_c

_SOURCE = Path(__file__).with_name("c") / "direct.c"


def direct(shape: ConvShape, which: ConvPass, first: Tensor, second: Tensor) -> Tensor:
    """Any of the three passes on a CPU, in fp32."""
    need_fp32("direct", first)
    library, pad = compile_c(_source()), shape.padding
    if which is ConvPass.DATA:
        height, width = shape.height + 2 * pad, shape.width + 2 * pad
        found = torch.zeros(*shape.image_size[:2], height, width)
        _call(library.direct_data, shape, first.contiguous(), second.contiguous(), found)
        return found[:, :, pad : pad + shape.height, pad : pad + shape.width].contiguous()
    forward = which is ConvPass.FORWARD
    found = torch.zeros(shape.result_size if forward else shape.weight_size)
    function = library.direct_forward if forward else library.direct_weight
    _call(function, shape, pad_images(shape, first), second.contiguous(), found)
    return found


@cache
def _source() -> str:
    return _SOURCE.read_text(encoding="utf-8")


def _call(function: ctypes._NamedFuncPointer, shape: ConvShape, *tensors: Tensor) -> None:
    sizes = (
        *(shape.batch, shape.groups, shape.weight_size[1], shape.out_channels // shape.groups),
        *(size + 2 * shape.padding for size in (shape.height, shape.width)),
        *shape.result_size[2:],
        *(shape.kernel, shape.stride, shape.dilation),
    )
    pointers = (ctypes.c_void_p(each.data_ptr()) for each in tensors)
    function(*pointers, (ctypes.c_long * len(sizes))(*sizes))
