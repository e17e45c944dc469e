"""A small JPEG of an image as a split gives it, for a page."""

from __future__ import annotations

import io

from PIL import Image
from torch import Tensor

_QUALITY = 82


def thumbnail(image: Tensor, side: int) -> bytes:
    """uint8 [C, H, W] as JPEG, no side longer than `side`; of other than one or three channels the first."""
    shown = image if len(image) == 3 else image[:1]
    pixels = shown.permute(1, 2, 0).contiguous().numpy()
    picture = Image.fromarray(pixels[:, :, 0] if len(shown) == 1 else pixels)
    picture.thumbnail((side, side), Image.Resampling.BILINEAR)
    file = io.BytesIO()
    picture.save(file, "jpeg", quality=_QUALITY)
    return file.getvalue()
