"""FFT: a convolution is a product at every frequency, whatever the size of the filter.

Images, filters and results are transformed as a whole; between them stands a product over channels for each
frequency. The cost does not know the kernel's size: large filters win, small ones pay for being padded to the
size of an image. A stride throws away results that were computed, and dilation fills the filter with zeros.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from lockstep.lab.conv.conv_input import need_memory, split_groups, work_precision
from lockstep.lab.conv.conv_shape import ConvPass, ConvShape


def fft_conv(shape: ConvShape, which: ConvPass, first: Tensor, second: Tensor) -> Tensor:
    """Any of the three passes, computed in fp32 or better and rounded to the tensors' type.

    The spectrum of what slides over the other is turned about, so that no pass needs a conjugate.
    """
    spectra = 2.0 * prod(fft_size(shape)) * transformed_planes(shape)  # and the planes themselves
    need_memory("FFT", "images and filters, padded to one size, with spectra", spectra, first)
    extent = shape.dilation * (shape.kernel - 1)
    if which is ConvPass.FORWARD:
        images = _spectrum(shape, _by_pixel(shape, first, 1), shape.padding, 1)
        filters = _spectrum(shape, _by_pixel(shape, second, 0).flip(0, 1).mT, 0, shape.dilation)
        rows, columns = (
            range(extent, extent + size * shape.stride, shape.stride) for size in shape.result_size[2:]
        )
        return _planes_at(shape, images @ filters, rows, columns, 1).to(first.dtype)
    if which is ConvPass.DATA:
        results = _spectrum(shape, _by_pixel(shape, first, 1), 0, shape.stride)
        filters = _spectrum(shape, _by_pixel(shape, second, 0), 0, shape.dilation)
        rows, columns = (range(shape.padding, shape.padding + size) for size in shape.image_size[2:])
        return _planes_at(shape, results @ filters, rows, columns, 1).to(first.dtype)
    images = _spectrum(shape, _by_pixel(shape, first, 1), shape.padding, 1)
    results = _spectrum(shape, _by_pixel(shape, second, 1).flip(0, 1).mT, 0, shape.stride)
    rows, columns = (
        range(start, start + extent + 1, shape.dilation)
        for start in ((size - 1) * shape.stride for size in shape.result_size[2:])
    )
    return _planes_at(shape, results @ images, rows, columns, 0).to(first.dtype)


def fft_size(shape: ConvShape) -> tuple[int, int]:
    """Rows and columns of the transform: a padded image, and a little more where that has small factors."""
    return _quick(shape.height + 2 * shape.padding), _quick(shape.width + 2 * shape.padding)


def _quick(size: int) -> int:
    """The next size whose only factors are 2, 3 and 5."""
    while _without_small_factors(size) > 1:
        size += 1
    return size


def _without_small_factors(size: int) -> int:
    for factor in (2, 3, 5):
        while size % factor == 0:
            size //= factor
    return size


def transformed_planes(shape: ConvShape) -> int:
    """Images and filters that are transformed, forth and back."""
    batch, inside, outside = shape.batch, shape.in_channels, shape.out_channels
    return batch * inside + outside * shape.weight_size[1] + batch * outside


def _by_pixel(shape: ConvShape, planes: Tensor, grouped: int) -> Tensor:
    """[rows, columns, G, N, C / G] of images, or [rows, columns, G, K / G, C / G] of filters."""
    split = split_groups(planes.to(work_precision(planes)), grouped, shape.groups)
    return split.permute(3, 4, 1, 0, 2) if grouped else split.permute(3, 4, 0, 1, 2)


def _spectrum(shape: ConvShape, planes: Tensor, before: int, step: int) -> Tensor:
    """Of planes whose pixels stand `step` apart, `before` from the edge; frequencies lead."""
    height, width = fft_size(shape)
    rows, columns = (before + 1 + (count - 1) * step for count in planes.shape[:2])
    laid = planes.new_zeros(rows, width, *planes.shape[2:])
    laid[before:rows:step, before:columns:step] = planes
    found: Tensor = torch.fft.fft(torch.fft.rfft(laid, dim=1), height, dim=0)  # skips rows of zeros
    return found


def _planes_at(shape: ConvShape, spectrum: Tensor, rows: range, columns: range, grouped: int) -> Tensor:
    """Back from a spectrum: these rows and columns, as images or filters have them."""
    planes: Tensor = torch.fft.irfft2(spectrum, s=fft_size(shape), dim=(0, 1))
    kept = planes[rows.start : rows.stop : rows.step, columns.start : columns.stop : columns.step]
    order = (3, 2, 4, 0, 1) if grouped else (2, 3, 4, 0, 1)
    return kept.permute(order).flatten(grouped, grouped + 1).contiguous()
