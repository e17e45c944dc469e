"""Mixup and cutmix: every sample of a lane is mixed with its partner in the lane, by one share a lane.

Data pipeline: store → order → augment → here → loader. Sample j's partner is sample n − 1 − j of its lane of
n. What is drawn is a function of (seed, epoch, step, lane), so lanes may be anywhere. Mixed labels are int64
[N, 3]: a sample's label, its partner's, and the sample's share in 1/1024. Shapes: N images, C, H, W.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from lockstep.kernels.loss import WHOLE_SHARE
from lockstep.kernels.random import key
from lockstep.spec.sample.augmentation import MIXES, read_numbers


@dataclass(frozen=True)
class SampleMix:
    """The alphas of mixup and cutmix; with both, each lane takes one of them."""

    seed: int
    shape: tuple[int, int]  # of images: H, W
    alphas: dict[str, float]

    @classmethod
    def parse(cls, items: Sequence[str], seed: int, shape: tuple[int, int]) -> SampleMix | None:
        """The mixes among the items of `data.augment`, or None, for images of H × W pixels."""
        named = ((item.partition(":")[0], item) for item in items)
        alphas = {name: read_numbers(item)[0] for name, item in named if name in MIXES}
        return cls(seed, shape, alphas) if alphas else None

    def apply(
        self, images: Tensor, labels: Tensor, epoch: int, step: int, lanes: range
    ) -> tuple[Tensor, Tensor]:
        """Mix the images [N, C, H, W], if there are any, and labels [N] of consecutive lanes of a step."""
        size, mixed = len(labels) // len(lanes), []
        for place, lane in enumerate(lanes):
            part = slice(place * size, (place + 1) * size)
            draw = Random(key("mix", self.seed, epoch, step, lane))
            mixed.append(self._mix_lane(images[part], labels[part], draw))
        images, labels = (torch.cat(parts) for parts in zip(*mixed, strict=True))
        return images, labels

    def _mix_lane(self, images: Tensor, labels: Tensor, draw: Random) -> tuple[Tensor, Tensor]:
        name = draw.choice(sorted(self.alphas))
        alpha = self.alphas[name]
        share = round(WHOLE_SHARE * draw.betavariate(alpha, alpha))  # coarse: libraries differ in a last bit
        if name == "mixup":
            weight = share / WHOLE_SHARE
            images = images * weight + images.flip(0) * (1 - weight)
        else:
            rows, cols = self._draw_box(share, draw)
            if images.dim() == 4:  # the last stage of a pipeline has none
                images = images.clone()
                images[:, :, rows, cols] = images.flip(0)[:, :, rows, cols]
            area = (rows.stop - rows.start) * (cols.stop - cols.start)
            share = round(WHOLE_SHARE * (1 - area / math.prod(self.shape)))
        shares = labels.new_full((len(labels),), share)
        return images, torch.stack([labels, labels.flip(0), shares], 1)

    def _draw_box(self, share: int, draw: Random) -> list[slice]:
        """The rows and columns that are the partner's, as torchvision draws them."""
        side = math.sqrt(1 - share / WHOLE_SHARE) / 2
        box = []
        for length in self.shape:
            middle, half = draw.randrange(length), int(side * length)
            box.append(slice(max(middle - half, 0), min(middle + half, length)))
        return box
