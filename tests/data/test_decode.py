"""Encoded images: boxes, scales and rows that are left out give the pixels of the whole; odd files."""

from __future__ import annotations

import io

import cv2
import numpy as np
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from lockstep.data.decoding import decode
from lockstep.data.decoding.decode import UNREADABLE, cut_image, fit_image, measure
from lockstep.data.decoding.decode_fingerprint import decode_fingerprint, explain_decoder

HEIGHT, WIDTH = 90, 130


def picture(height: int = HEIGHT, width: int = WIDTH) -> Image.Image:
    """Smooth, with some noise, as photographs are."""
    rows, cols = np.mgrid[0:height, 0:width]
    noise = np.random.default_rng(0).integers(0, 30, (height, width, 3))
    waves = 110 + 90 * np.sin(rows / 9)[..., None] * np.cos(cols[..., None] / np.array([7, 11, 13]))
    return Image.fromarray((waves + noise).clip(0, 255).astype(np.uint8))


def encode(image: Image.Image, form: str = "JPEG", **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def cut(data: bytes, box: tuple[int, int, int, int], shape: tuple[int, int, int]) -> np.ndarray:
    out = np.empty(shape, np.uint8)
    cut_image(data, box, out)
    return out


def fit(data: bytes, shape: tuple[int, int, int]) -> np.ndarray:
    out = np.empty(shape, np.uint8)
    fit_image(data, out)
    return out


@given(st.data(), st.sampled_from([0, 1, 2]), st.booleans())
def test_a_box_has_the_pixels_of_the_whole(data: st.DataObject, subsampling: int, progressive: bool) -> None:
    encoded = encode(picture(), quality=90, subsampling=subsampling, progressive=progressive)
    top, left = data.draw(st.integers(0, HEIGHT - 1)), data.draw(st.integers(0, WIDTH - 1))
    height, width = data.draw(st.integers(1, HEIGHT - top)), data.draw(st.integers(1, WIDTH - left))
    whole = simplejpeg.decode_jpeg(encoded, fastupsample=True)
    wanted = cv2.resize(whole[top : top + height, left : left + width], (64, 50))
    found = cut(encoded, (top, left, height, width), (3, 50, 64)).transpose(1, 2, 0)
    if (height, width) == (50, 64):
        wanted = whole[top : top + height, left : left + width]
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_large_image_is_decoded_at_the_scale_that_is_needed(form: str, channels: int) -> None:
    image = picture(800, 1000)
    encoded, mode = encode(image, form), "L" if channels == 1 else "RGB"
    for box, size in (((0, 0, 800, 1000), (80, 100)), ((81, 203, 510, 600), (100, 110))):
        top, left, height, width = box
        part = image.crop((left, top, left + width, top + height)).convert(mode)
        small = np.asarray(part.resize(size[::-1], Image.Resampling.BOX)).reshape(*size, channels)
        found = cut(encoded, box, (channels, *size)).transpose(1, 2, 0)
        assert np.abs(found.astype(int) - small).mean() < 12, form
    whole = np.asarray(image.convert(mode).resize((100, 80), Image.Resampling.BILINEAR)).astype(int)
    found = fit(encoded, (channels, 80, 100)).transpose(1, 2, 0)
    assert np.abs(found - whole.reshape(80, 100, channels)).mean() < 4


def test_what_has_the_size_already_is_not_resized() -> None:
    encoded = encode(picture(48, 48), quality=95)
    assert np.array_equal(fit(encoded, (3, 48, 48)).transpose(1, 2, 0), simplejpeg.decode_jpeg(encoded))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_boxes_are_of_the_upright_image(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.new("RGB", (64, 32), "blue")
    image.paste("red", (0, 0, 32, 16))  # a quarter, which each orientation puts elsewhere
    encoded = encode(image, quality=95, exif=exif)
    with Image.open(io.BytesIO(encoded)) as file:
        upright = np.asarray(ImageOps.exif_transpose(file)).astype(int)
    height, width = upright.shape[:2]
    assert measure(encoded) == (height, width)
    box = (height // 2, 0, height // 2, width // 2)
    found = cut(encoded, box, (3, *box[2:])).transpose(1, 2, 0)
    assert np.abs(found - upright[height // 2 :, : width // 2]).mean() < 3


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16"])
def test_boxes_of_every_mode(mode: str) -> None:
    image = Image.new(mode, (40, 20), 40000 if mode == "I;16" else 0)
    encoded = encode(image, "JPEG" if mode == "CMYK" else "PNG")
    for channels in (1, 3):
        assert cut(encoded, (3, 5, 10, 12), (channels, 8, 8)).shape == (channels, 8, 8)


def test_truncated_and_damaged_images_are_refused_in_boxes_too() -> None:
    encoded = encode(picture(), quality=95)
    for data in (encoded[: len(encoded) // 2], encoded[:-2], b"", b"\xff\xd8\xff", b"no image"):
        with pytest.raises(UNREADABLE):
            cut(data, (0, 0, 20, 20), (3, 20, 20))
        with pytest.raises(UNREADABLE):
            fit(data, (3, 20, 20))


def test_a_scan_for_each_colour_is_decoded_whole() -> None:
    """Such a JPEG cannot be cut below a row: its first colour ends where the image does."""
    encoded = encode(picture(), quality=90, progressive=True)
    assert decode._cut_rows(encoded, HEIGHT, 10) is None
    rows, shorter = decode._cut_rows(encode(picture(), quality=90), HEIGHT, 10) or (0, b"")
    assert rows == 16 and simplejpeg.decode_jpeg(shorter, strict=False).shape == (16, WIDTH, 3)


def test_too_many_pixels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_MOST_PIXELS", 100)
    with pytest.raises(Image.DecompressionBombError, match="90 x 130 pixels are too many"):
        measure(encode(picture()))


def test_pillow_alone_gives_nearly_the_same_and_another_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded, box = encode(picture(), quality=90), (7, 9, 70, 100)
    ours, fitted = cut(encoded, box, (3, 50, 64)), fit(encoded, (3, 50, 64))
    told = decode_fingerprint()
    assert explain_decoder() == ()
    assert "simplejpeg" in told and "opencv" in told and decode_fingerprint() is told
    monkeypatch.setattr(decode, "find_libraries", lambda: (None, None))
    monkeypatch.setattr("lockstep.data.decoding.decode_fingerprint.find_libraries", lambda: (None, None))
    assert np.abs(cut(encoded, box, (3, 50, 64)).astype(int) - ours).mean() < 6
    assert np.abs(fit(encoded, (3, 50, 64)).astype(int) - fitted).max() <= 3  # two libjpegs
    assert "lockstep-train[images]" in explain_decoder()[0]
    alone = decode_fingerprint.__wrapped__()
    assert "simplejpeg" not in alone and alone.rpartition(" ")[2] != told.rpartition(" ")[2]


def test_a_marker_may_be_repeated() -> None:
    encoded = encode(picture(), quality=90)
    at = encoded.index(b"\xff\xdb")
    odd = encoded[:at] + b"\xff" + encoded[at:]
    assert np.array_equal(cut(odd, (5, 5, 20, 20), (3, 20, 20)), cut(encoded, (5, 5, 20, 20), (3, 20, 20)))


def test_a_box_outside_is_refused() -> None:
    for form in ("JPEG", "PNG"):
        with pytest.raises(ValueError, match="smaller than when its size was read"):
            cut(encode(picture(), form), (0, 0, HEIGHT + 40, WIDTH), (3, 8, 8))


def test_measuring_a_png_decodes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = encode(picture(), "PNG")
    monkeypatch.setattr(Image.Image, "load", None)
    assert measure(encoded) == (HEIGHT, WIDTH)
