"""Random resized crops: a box of each image as a function of seed, epoch, sample and size, read and resized.

The boxes are torchvision's: a share of the area, then an aspect ratio, drawn again up to ten times until the
box lies in the image. Only operations that IEEE 754 rounds correctly are used, so that every machine draws
the same boxes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lockstep.data.decoding.batch_decoder import cut_range, in_parallel
from lockstep.data.decoding.decode import Pixels, resize_box
from lockstep.data.store import Split
from lockstep.kernels import random

_RATIO = 3 / 4, 4 / 3
_LOG = 0.2876820724517809  # of 4 / 3
_TRIES = 10
_TERMS = 14  # of the series of exp, enough for float64 where |x| < 0.3


@runtime_checkable
class BoxSplit(Protocol):
    """A split whose images have sizes of their own, and that reads no more of them than a box."""

    def sizes(self, ids: Tensor) -> Tensor: ...

    def read_boxes(self, ids: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]: ...


def read_random_boxes(
    split: Split, ids: Tensor, seed: int, epoch: int, scale: tuple[float, float]
) -> tuple[Tensor, Any]:
    """A random box of each image, resized to the split's shape, and the targets; ids of `sample_ids`."""
    places = ids % len(split)
    if isinstance(split, BoxSplit):
        boxes = draw_boxes(ids, split.sizes(places), seed, epoch, scale)
        return split.read_boxes(places, boxes)
    images, targets = split.read(places)
    sizes = torch.tensor(images.shape[2:]).expand(len(ids), 2)
    drawn = draw_boxes(ids, sizes, seed, epoch, scale).tolist()
    source: Pixels = images.permute(0, 2, 3, 1).contiguous().numpy()
    result = torch.empty_like(images, memory_format=torch.contiguous_format)
    out: Pixels = result.numpy()

    def fill(part: range) -> None:
        for place in part:
            resize_box(source[place], drawn[place], out[place])

    for _ in in_parallel(fill, cut_range(len(ids))):
        pass
    return result, targets


def draw_boxes(ids: Tensor, sizes: Tensor, seed: int, epoch: int, scale: tuple[float, float]) -> Tensor:
    """A box of each image: int64 [N, 4], top, left, height and width; `sizes` [N, 2] are of the images."""

    def draw(what: str, low: float, high: float) -> Tensor:
        return low + (high - low) * random.uniform(_keys(what, seed, epoch), ids).double()  # [tries, N]

    rows, cols = sizes.double().unbind(1)
    area, ratio = rows * cols * draw("area", *scale), _exp(draw("ratio", -_LOG, _LOG))
    height, width = (area / ratio).sqrt().round(), (area * ratio).sqrt().round()
    fits = (height > 0) & (height <= rows) & (width > 0) & (width <= cols)
    first = fits.int().argmax(0, keepdim=True)  # the first try that fits
    height, width = height.gather(0, first)[0], width.gather(0, first)[0]
    top = (draw("top", 0.0, 1.0).gather(0, first)[0] * (rows - height + 1)).floor()
    left = (draw("left", 0.0, 1.0).gather(0, first)[0] * (cols - width + 1)).floor()
    drawn = torch.stack([top, left, height, width], 1)
    height, width = _widest(rows, cols)
    middle = torch.stack([((rows - height) / 2).floor(), ((cols - width) / 2).floor(), height, width], 1)
    return torch.where(fits.any(0)[:, None], drawn, middle).long()


@lru_cache(maxsize=16)
def _keys(what: str, seed: int, epoch: int) -> Tensor:
    """The keys of all tries, [tries, 1]."""
    keys = [random.key("augment", seed, epoch, f"box-{what}", turn) for turn in range(_TRIES)]
    return torch.tensor(keys)[:, None]


def _widest(rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
    """Height and width of the largest box with an allowed ratio: where no box was found."""
    low, high = _RATIO
    ratio = cols / rows
    height = torch.where(ratio < low, (cols / low).round(), rows)
    width = torch.where(ratio > high, (rows * high).round(), cols)
    return height.clamp(min=1), width.clamp(min=1)


def _exp(x: Tensor) -> Tensor:
    """exp by its series: libraries differ in its last bit."""
    result = torch.ones_like(x)
    for term in range(_TERMS, 0, -1):
        result = 1 + x * result / term
    return result
