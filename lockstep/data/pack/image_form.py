"""The forms an image may have in a pack: its file as it is, a smaller JPEG, or raw pixels.

Every image is decoded here, whatever its form: what cannot be decoded is found before it is in a pack.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from lockstep.data.decoding.decode import Pixels, as_mode, fit_image, measure
from lockstep.data.decoding.decode_fingerprint import decode_fingerprint
from lockstep.data.pack.packable import Packable
from lockstep.data.store import check_size
from lockstep.errors import DataError

_JPEG = b"\xff\xd8"
_GREY = ("1", "L", "LA", "I", "I;16", "I;16B", "I;16L", "F")


@dataclass(frozen=True)
class PackedImage:
    """An image as it goes into a shard; height and width are those after its EXIF rotation."""

    data: bytes
    suffix: str
    height: int
    width: int


@dataclass(frozen=True)
class ImageForm:
    """What becomes of each image. kind: files, jpeg (resized if larger than `size`) or raw."""

    kind: str = "files"
    size: int = 0  # 0: as it is
    quality: int = 90

    def __post_init__(self) -> None:
        if self.kind not in ("files", "jpeg", "raw"):
            raise DataError(f"--as {self.kind}: an image is packed as files, jpeg or raw")
        if self.size < 0 or (self.kind == "jpeg" and not self.size):
            raise DataError(f"--size {self.size}: an image needs at least 1 pixel a side; try 256")
        if self.kind == "files" and self.size:
            raise DataError("--size: files are kept as they are: use --as jpeg or --raw with it")
        check_size(self.size)
        if not 1 <= self.quality <= 100:
            raise DataError(f"--quality {self.quality}: JPEG has 1 to 100; try 90")

    def facts(self, source: Packable) -> dict[str, Any]:
        """What identifies the form, and what encodes it: other libraries may give other bytes."""
        facts: dict[str, Any] = {"kind": self.kind}
        if self.kind != "files":
            facts["size"] = self.size
        if self.kind == "jpeg":
            facts["quality"] = self.quality
        if self.kind != "files" or source.pixels:
            facts["encoder"] = decode_fingerprint()
        return facts

    def shape(self, source: Packable) -> tuple[int, int, int] | None:
        """H W C of raw pixels; None if images are encoded. Refuses pixels that the form cannot have."""
        channels = source.pixels[2] if source.pixels else source.channels
        if channels not in (1, 3) and (self.kind != "raw" or self.size):
            raise DataError(f"images of {channels} channels cannot be encoded or resized: use --raw alone")
        if self.kind != "raw":
            return None
        if self.size:
            return self.size, self.size, channels
        if source.pixels is None:
            raise DataError(
                "--raw: images may have any size, pixels need one: add --size, such as --size 256"
            )
        return source.pixels

    def encode(self, image: bytes | Pixels, channels: int) -> PackedImage:
        """Decode and check one image, and give what goes into the pack; one of UNREADABLE if it cannot be."""
        if not isinstance(image, bytes):
            return self._encode_pixels(image)
        if self.kind == "raw":
            pixels = np.empty((channels, self.size, self.size), np.uint8)
            fit_image(image, pixels)
            return PackedImage(pixels.transpose(1, 2, 0).tobytes(), "npy", self.size, self.size)
        if image.startswith(_JPEG):
            height, width = measure(image)
            if not self._is_larger(height, width):
                fit_image(image, np.empty((3, 1, 1), np.uint8))  # decodes all of it, at the smallest scale
                return PackedImage(image, "jpg", height, width)
        with Image.open(io.BytesIO(image)) as file:
            upright = ImageOps.exif_transpose(file)
            if self._is_larger(*upright.size):
                return self._shrink(upright)
            as_mode(upright, "RGB")
            return PackedImage(image, (file.format or "").lower(), upright.height, upright.width)

    def _encode_pixels(self, pixels: Pixels) -> PackedImage:
        if self.kind == "raw" and not self.size:
            return PackedImage(pixels.tobytes(), "npy", *pixels.shape[:2])
        image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
        if self._is_larger(*image.size):
            return self._shrink(image)
        if self.kind != "raw":
            return PackedImage(_save(image, "PNG"), "png", image.height, image.width)
        fitted = ImageOps.fit(image, (self.size, self.size), Image.Resampling.BILINEAR)
        return PackedImage(np.asarray(fitted).tobytes(), "npy", self.size, self.size)

    def _is_larger(self, one_side: int, other: int) -> bool:
        return self.kind == "jpeg" and min(one_side, other) > self.size

    def _shrink(self, image: Image.Image) -> PackedImage:
        """A JPEG whose shorter side has `size` pixels."""
        plain = as_mode(image, "L" if image.mode in _GREY else "RGB")
        shorter = min(plain.size)
        width, height = (round(side * self.size / shorter) for side in plain.size)
        small = plain.resize((width, height), Image.Resampling.BILINEAR)
        return PackedImage(_save(small, "JPEG", quality=self.quality), "jpg", height, width)


def _save(image: Image.Image, format: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()
