"""Affine maps of images: shear, translation, rotation, to the nearest pixel, in Pillow's fixed point.

A map is six whole numbers in 1/65536: output pixel (x, y) is taken from ((a·x + b·y + c), (d·x + e·y + f)),
rounded down. Pixels from outside the image are 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_ONE = 1 << 16


def affine(images: Tensor, maps: Tensor) -> Tensor:
    """Move the pixels of each image by its map [N, 6]."""
    height, width = images.shape[2:]
    x, y = torch.arange(width, device=images.device), torch.arange(height, device=images.device)[:, None]
    a, b, c, d, e, f = maps[:, :, None, None].unbind(1)
    col, row = (a * x + (b * y + c)) >> 16, (d * x + (e * y + f)) >> 16
    near_col, near_row = col.clamp(0, width - 1), row.clamp(0, height - 1)
    inside = (near_col == col) & (near_row == row)
    index = (near_row * width + near_col).flatten(1)[:, None].expand(-1, images.shape[1], -1)
    return images.flatten(2).gather(2, index).view_as(images) * inside[:, None].to(images.dtype)


def shear_x_map(slope: float) -> list[int]:
    """Shift each row by its distance from the top, times `slope`."""
    return _fixed(1, slope, 0, 0, 1, 0)


def shear_y_map(slope: float) -> list[int]:
    """Shift each column by its distance from the left, times `slope`."""
    return _fixed(1, 0, 0, slope, 1, 0)


def translate_map(right: int, down: int) -> list[int]:
    """Shift by whole pixels."""
    return _fixed(1, 0, -right, 0, 1, -down)


def rotate_map(degrees: float, height: int, width: int) -> list[int]:
    """Turn an image anticlockwise around its centre."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    x, y = width / 2, height / 2
    return _fixed(cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y)


def _fixed(a: float, b: float, c: float, d: float, e: float, f: float) -> list[int]:
    """A map of the centres of pixels, in fixed point."""
    shifted = (a, b, c + a / 2 + b / 2, d, e, f + d / 2 + e / 2)
    return [math.floor(number * _ONE + 0.5) for number in shifted]
