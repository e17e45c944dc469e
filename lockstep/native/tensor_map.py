"""Describes a matrix to a Hopper GPU's copy engine, which then brings or writes a box of it at a time."""

from __future__ import annotations

import ctypes

from torch import Tensor

from lockstep.native.cuda_kernel import call_driver

_BYTES = 128
_BF16, _NO_INTERLEAVE, _SWIZZLE_128, _PROMOTE_256, _ZEROS = 9, 0, 3, 3, 0  # values of the driver's enums


def describe_matrix(matrix: Tensor, box: tuple[int, int]) -> bytes:
    """A kernel's argument: rows of bf16 that are a multiple of 16 bytes long, boxes of rows × columns."""
    rows, columns = matrix.shape
    room = ctypes.create_string_buffer(_BYTES + 64)
    start = ctypes.addressof(room) + -ctypes.addressof(room) % 64
    call_driver(
        "cuTensorMapEncodeTiled",
        ctypes.c_void_p(start),
        _BF16,
        2,
        ctypes.c_void_p(matrix.data_ptr()),
        (ctypes.c_uint64 * 2)(columns, rows),
        (ctypes.c_uint64 * 1)(2 * columns),
        (ctypes.c_uint32 * 2)(box[1], box[0]),
        (ctypes.c_uint32 * 2)(1, 1),
        _NO_INTERLEAVE,
        _SWIZZLE_128,
        _PROMOTE_256,
        _ZEROS,
    )
    return ctypes.string_at(start, _BYTES)
