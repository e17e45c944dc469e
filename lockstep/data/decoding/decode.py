"""Decodes the bytes of an image file: fitted to a shape, or a box of it; a JPEG only at the scale it needs.

simplejpeg decodes JPEGs and OpenCV resizes boxes where they are installed (the extra `images`); else Pillow
does both. So pixels are a function of the bytes, the box and these libraries; `decode_fingerprint` tells the
libraries and a hash of pixels. A JPEG is decoded at 1/2, 1/4 or 1/8, which its cosine transform allows, where
at least the wanted size is left. Shapes: C channels, H rows, W columns; a box is top, left, height, width.
"""

from __future__ import annotations

from functools import cache
from io import BytesIO
from types import ModuleType

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

Encoded = bytes | memoryview
Pixels = npt.NDArray[np.uint8]
UNREADABLE = (OSError, SyntaxError, ValueError, UnidentifiedImageError, Image.DecompressionBombError)
_SCALES = (8, 4, 2)
_BLOCK, END = 16, b"\xff\xd9"  # rows of a block at most; what a JPEG ends with
_START = 1 << 16  # bytes in which a JPEG says how it is rotated
_ORIENTATION = 0x0112
_MOST_PIXELS = 2 * (Image.MAX_IMAGE_PIXELS or 0)  # as Pillow has it


@cache
def find_libraries() -> tuple[ModuleType | None, ModuleType | None]:
    """simplejpeg and cv2, where they are installed."""
    try:
        import simplejpeg
    except ImportError:
        simplejpeg = None
    try:
        import cv2
    except ImportError:
        return simplejpeg, None
    cv2.setNumThreads(1)  # there is a thread an image already
    return simplejpeg, cv2


def measure(data: Encoded) -> tuple[int, int]:
    """Height and width of an image as it is meant to be seen, from its header."""
    return _measure_plain_jpeg(data) or _measure_any(data)


def fit_image(data: Encoded, out: Pixels, share: float = 1.0) -> None:
    """Decode an image into `out` [C, H, W]: the largest box of its shape in the middle, resized smoothly.

    Of the box's sides only the middle `share` is taken.
    """
    channels, rows, cols = out.shape
    plain = _measure_plain_jpeg(data)
    height, width = plain or _measure_any(data)
    ratio = cols / rows
    box_width, box_height = (ratio * height, height) if width / height >= ratio else (width, width / ratio)
    box_width, box_height = share * box_width, share * box_height
    scale = _find_scale(box_height, box_width, rows, cols)
    pixels, scale = _decode(data, plain, channels, scale)
    if pixels.shape[:2] == (rows, cols) and share == 1:
        _put(pixels, out)
        return
    left, top = (width - box_width) * 0.5, (height - box_height) * 0.5
    right, bottom = (left + box_width) / scale, (top + box_height) / scale
    box = (left / scale, top / scale, min(right, pixels.shape[1]), min(bottom, pixels.shape[0]))
    image = Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels)
    fitted = image.resize((cols, rows), Image.Resampling.BILINEAR, box=box)
    _put(np.asarray(fitted), out)


def cut_image(data: Encoded, box: tuple[int, int, int, int], out: Pixels) -> None:
    """Decode a box of an image into `out` [C, H, W]."""
    channels, rows, cols = out.shape
    top, left, height, width = box
    scale = _find_scale(height, width, rows, cols)
    pixels, scale = _decode(data, _measure_plain_jpeg(data), channels, scale, last_row=top + height)
    if top + height > scale * pixels.shape[0] or left + width > scale * pixels.shape[1]:
        raise ValueError("smaller than when its size was read")
    height, width = height // scale, width // scale
    top = min((top + scale // 2) // scale, pixels.shape[0] - height)
    left = min((left + scale // 2) // scale, pixels.shape[1] - width)
    resize_box(pixels, (top, left, height, width), out)


def resize_box(pixels: Pixels, box: tuple[int, int, int, int], out: Pixels) -> None:
    """Resize a box of `pixels` [H, W, C] into `out` [C, H, W], bilinear."""
    channels, rows, cols = out.shape
    top, left, height, width = box
    part = pixels[top : top + height, left : left + width]
    cv2 = find_libraries()[1]
    if (height, width) == (rows, cols):
        found = part
    elif cv2:
        found = cv2.resize(part, (cols, rows), interpolation=cv2.INTER_LINEAR)
    else:
        image = Image.fromarray(part[:, :, 0] if channels == 1 else part)
        found = np.asarray(image.resize((cols, rows), Image.Resampling.BILINEAR))
    _put(found, out)


def _put(pixels: Pixels, out: Pixels) -> None:
    """Copy [H, W, C] or [H, W] to [C, H, W]."""
    cv2 = find_libraries()[1]
    if cv2 and len(out) > 1:
        cv2.split(pixels, list(out))
    else:
        out[:] = pixels.reshape(*out.shape[1:], len(out)).transpose(2, 0, 1)


def _find_scale(height: float, width: float, rows: int, cols: int) -> int:
    """The largest scale at which a box of height × width still has rows × cols pixels."""
    return next((each for each in _SCALES if height >= each * rows and width >= each * cols), 1)


def _measure_plain_jpeg(data: Encoded) -> tuple[int, int] | None:
    """Height and width of a grey or coloured JPEG that is upright; None for anything else."""
    simplejpeg = find_libraries()[0]
    start = bytes(data[:_START])
    if simplejpeg is None or not start.startswith(b"\xff\xd8"):
        return None
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    if space not in ("YCbCr", "Gray", "RGB"):
        return None
    if not is_upright(data):
        return None
    if height * width > _MOST_PIXELS:
        raise Image.DecompressionBombError(f"{height} x {width} pixels are too many")
    return height, width


def is_upright(data: Encoded) -> bool:
    """Whether a JPEG is to be seen as it is stored."""
    if b"Exif\0\0" not in bytes(data[:_START]):
        return True
    with Image.open(BytesIO(data)) as file:
        return _orientation(file) == 1


def _measure_any(data: Encoded) -> tuple[int, int]:
    with Image.open(BytesIO(data)) as file:
        turned = _orientation(file) >= 5
        return (file.width, file.height) if turned else (file.height, file.width)


def _orientation(file: Image.Image) -> int:
    """How an image is turned, as EXIF counts it; what stands behind a PNG's pixels is not looked for."""
    if file.format == "PNG" and "exif" not in file.info:
        return 1
    return int(file.getexif().get(_ORIENTATION, 1))


def _decode(
    data: Encoded, plain: tuple[int, int] | None, channels: int, scale: int, last_row: int = 0
) -> tuple[Pixels, int]:
    """The pixels [H, W, C], upright, and the scale: a JPEG is decoded at 1 / `scale`, anything else at 1.

    A `plain` JPEG has this height and width. With `last_row` a box is wanted that ends there: rows below are
    left out, and colours between two samples are repeated, not blended.
    """
    simplejpeg = find_libraries()[0]
    if plain and simplejpeg:
        rows, cut = (last_row and _cut_rows(data, plain[0], last_row)) or (plain[0], data)
        try:
            found: Pixels = simplejpeg.decode_jpeg(
                cut,
                "GRAY" if channels == 1 else "RGB",
                fastupsample=last_row > 0,
                min_height=-(-rows // scale),
                min_width=-(-plain[1] // scale),
                min_factor=scale,
                strict=cut is data,  # else the rows that are left out count as a fault
            )
            return found, scale
        except ValueError:
            pass  # Pillow may still read it, or says what is wrong
    mode = "L" if channels == 1 else "RGB"
    with Image.open(BytesIO(data)) as file:
        whole = file.size
        file.draft(mode, (file.width // scale, file.height // scale))  # of a JPEG only
        done = 1 if file.size == whole else scale
        is_turned = _orientation(file) != 1
        file.load()
        image = as_mode(ImageOps.exif_transpose(file) if is_turned else file, mode)
    return np.asarray(image).reshape(image.height, image.width, channels), done


def _cut_rows(data: Encoded, height: int, last_row: int) -> tuple[int, bytearray] | None:
    """A JPEG without the rows far below `last_row`, and how many are left; None if it cannot be cut.

    Its header tells fewer rows, so that the decoder ends early. The JPEG must hold all colours in one scan,
    and end as it should: the decoder would not notice if it were truncated.
    """
    rows = -(-(last_row + 2) // _BLOCK) * _BLOCK  # a block is at most 16 rows; and two rows for blending
    if rows >= height or bytes(data[-2:]) != END:
        return None
    place, frame = 2, 0
    while place + 10 < len(data) and data[place] == 0xFF:
        marker, length = data[place + 1], data[place + 2] << 8 | data[place + 3]
        if marker == 0xFF:  # it may be repeated
            place += 1
            continue
        if marker in (0xC0, 0xC1):  # sequential; others are progressive or arithmetic
            frame = place
        elif marker == 0xDA:
            if not frame or data[place + 4] != data[frame + 9]:
                return None
            cut = bytearray(data)
            cut[frame + 5 : frame + 7] = rows.to_bytes(2)
            return rows, cut
        place += 2 + length
    return None


def explain_unreadable(error: Exception) -> str:
    """Why an image cannot be read, in a few words."""
    if isinstance(error, UnidentifiedImageError):
        return "not an image"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.replace("\n", " ")


def as_mode(image: Image.Image, mode: str) -> Image.Image:
    """Convert any mode to grey or RGB; 16-bit greys are scaled, since Pillow would clip them at 255."""
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    if image.mode == "P":  # a palette may hold transparency, which RGB cannot
        image = image.convert("RGBA")
    return image if image.mode == mode else image.convert(mode)
