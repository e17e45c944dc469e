"""Options of data sets that decode: sizes of training images by epoch, size and share in evaluation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from lockstep.data.store import check_size
from lockstep.errors import DataError, unknown

DECODERS = ("cpu", "nvjpeg")


class View(NamedTuple):
    """How images are given: C H W, the share of `fit_image`, and what decodes them."""

    shape: tuple[int, int, int]
    share: float = 1.0
    decoder: str = "cpu"


@dataclass(frozen=True)
class ViewOptions:
    """What a user may set for any of them; `eval_size` 0 is as for training, no `sizes` are one for all."""

    eval_size: int = 0
    crop_pct: float = 1.0
    sizes: str = ""
    decoder: str = "cpu"

    def __post_init__(self) -> None:
        if self.eval_size < 0:
            raise DataError(f"data.eval_size={self.eval_size}: must be 0 (as for training), or pixels a side")
        check_size(self.eval_size, "eval_size")
        if not 0 < self.crop_pct <= 1:
            raise DataError(f"data.crop_pct={self.crop_pct}: must be above 0 and at most 1, such as 0.875")
        for _, size in self.stages:
            check_size(size, "sizes")
        if self.decoder not in DECODERS:
            raise DataError(f"data.decoder: {unknown('decoder', self.decoder, DECODERS)}")

    @property
    def stages(self) -> tuple[tuple[int, int], ...]:
        """The first epoch of each size, and the size."""
        if not self.sizes:
            return ()
        parts = [part.strip() for part in self.sizes.split(",")]
        found = [re.fullmatch(r"([1-9]\d{0,6})@(\d{1,6})", part) for part in parts]
        stages = tuple((int(match[2]), int(match[1])) for match in found if match)
        rises = all(first < then for (first, _), (then, _) in pairwise(stages))
        if not all(found) or stages[0][0] != 0 or not rises:
            raise DataError(
                f"data.sizes={self.sizes}: must be sizes with their first epochs, from 0 on and rising, such "
                "as 128@0,160@6,192@12"
            )
        return stages

    def facts(self) -> dict[str, object]:
        """What identifies them, beside the images."""
        sizes = ",".join(f"{size}@{epoch}" for epoch, size in self.stages)
        shown = {"eval_size": self.eval_size, "crop_pct": float(self.crop_pct), "sizes": sizes}
        plain = {"eval_size": 0, "crop_pct": 1.0, "sizes": ""}
        return {key: value for key, value in shown.items() if value != plain[key]}

    def view(self, split: str, shape: tuple[int, int, int], eval_shape: tuple[int, int, int]) -> View:
        """How the images of a split are given."""
        if split == "train":
            return View(shape, 1.0, self.decoder)
        return View(eval_shape, self.crop_pct, self.decoder)
