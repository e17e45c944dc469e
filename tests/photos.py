"""Folders of small JPEG files, a class a colour, for runs on images of one's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

import lockstep
from lockstep.spec.run_file import from_table, merge, parse_overrides, to_table

CLASSES = ("blue", "green", "red")


def take_photos(folder: Path, **counts: int) -> Path:
    """`counts` images of each class in each split, as train=10."""
    random = np.random.default_rng(0)
    for split, count in counts.items():
        for index, name in enumerate(CLASSES):
            for number in range(count):
                pixels = random.integers(0, 120, (20, 24, 3), dtype=np.uint8)
                pixels[..., 2 - index] += 90
                path = folder / split / name / f"{number}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(path)
    return folder


def photo_run(folder: Path, *overrides: str) -> lockstep.Run:
    """LeNet-5 on them: batches of 8 in 2 lanes, 2 epochs."""
    plain = lockstep.Run(
        data=lockstep.Data("folder", dir=str(folder), options={"size": 16}),
        train=lockstep.Train(epochs=2, batch=8, lanes=2),
    )
    return from_table(merge(to_table(plain), parse_overrides(list(overrides))))
