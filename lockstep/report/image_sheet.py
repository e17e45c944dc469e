"""Draws a sheet of images with a line of text below each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SIDE = 1.6  # inches of an image
_LETTERS = 22  # most below an image


def draw_sheet(images: Any, texts: Sequence[str], path: Path) -> None:
    """Draw uint8 images [N, H, W, C] in rows, and write them to a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(8, math.ceil(math.sqrt(len(images))))
    rows = math.ceil(len(images) / columns)
    figure = Figure(figsize=(columns * _SIDE, rows * (_SIDE + 0.25)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    for place, axes in enumerate(figure.subplots(rows, columns, squeeze=False).flat):
        axes.set_axis_off()
        if place < len(images):
            image, text = images[place], texts[place]
            axes.imshow(image[:, :, 0] if image.shape[2] == 1 else image, cmap="gray", vmin=0, vmax=255)
            short = text if len(text) <= _LETTERS else f"{text[: _LETTERS - 1]}…"
            axes.set_title(short, fontsize=7, y=-0.16)
    figure.savefig(path)
