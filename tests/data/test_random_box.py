"""Random resized crops: torchvision's boxes, the same for a sample in any batch, and read by any split."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.images.random_box import draw_boxes, read_random_boxes
from lockstep.data.store import MemorySplit
from lockstep.kernels import random

SCALE = 0.08, 1.0


def by_hand(sample: int, height: int, width: int, seed: int, epoch: int) -> list[int]:
    """One sample, with Python's own floats and exp."""

    def draw(what: str, turn: int, low: float, high: float) -> float:
        key = random.key("augment", seed, epoch, f"box-{what}", turn)
        return low + (high - low) * float(random.uniform(key, torch.tensor([sample]))[0])

    for turn in range(10):
        area = height * width * draw("area", turn, *SCALE)
        ratio = math.exp(draw("ratio", turn, math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top = int(draw("top", turn, 0, 1) * (height - h + 1))
            return [top, int(draw("left", turn, 0, 1) * (width - w + 1)), h, w]
    ratio = width / height
    h = round(width / (3 / 4)) if ratio < 3 / 4 else height
    w = round(height * (4 / 3)) if ratio > 4 / 3 else width
    return [(height - h) // 2, (width - w) // 2, h, w]


@given(st.integers(0, 1 << 40), st.integers(1, 700), st.integers(1, 700), st.integers(0, 9))
def test_boxes_are_those_of_torchvision(sample: int, height: int, width: int, epoch: int) -> None:
    ids = torch.tensor([5, sample, 7])
    sizes = torch.tensor([[30, 40], [height, width], [1, 500]])
    found = draw_boxes(ids, sizes, 3, epoch, SCALE)
    assert found[1].tolist() == by_hand(sample, height, width, 3, epoch)
    alone = draw_boxes(ids[1:2], sizes[1:2], 3, epoch, SCALE)
    assert alone[0].equal(found[1])


def test_boxes_lie_inside_and_differ_by_epoch() -> None:
    ids, sizes = torch.arange(4000), torch.tensor([375, 500]).expand(4000, 2)
    boxes = draw_boxes(ids, sizes, 0, 0, SCALE)
    top, left, height, width = boxes.unbind(1)
    assert (boxes[:, :2] >= 0).all() and (top + height <= 375).all() and (left + width <= 500).all()
    share = (height * width).double() / (375 * 500)
    assert share.min() > 0.07 and 0.4 < share.mean() < 0.56
    assert (width / height).min() > 0.7 and (width / height).max() < 1.4
    assert (draw_boxes(ids, sizes, 0, 1, SCALE) != boxes).any(1).float().mean() > 0.99


def test_images_in_memory_are_cropped_as_files_are() -> None:
    generator = torch.Generator().manual_seed(0)
    split = MemorySplit(torch.randint(0, 256, (20, 3, 16, 12), generator=generator).byte(), torch.arange(20))
    ids = torch.tensor([3, 19, 3, 0, 8])
    images, labels = read_random_boxes(split, ids, 0, 2, SCALE)
    assert images.shape == (5, 3, 16, 12) and labels.tolist() == ids.tolist()
    for place, sample in enumerate(ids.tolist()):
        assert read_random_boxes(split, torch.tensor([sample]), 0, 2, SCALE)[0][0].equal(images[place])
    assert not read_random_boxes(split, ids, 0, 3, SCALE)[0].equal(images)
