"""JPEGs decoded by a GPU, for machines with few cores beside it: `data.decoder=nvjpeg`.

nvJPEG comes with the CUDA toolkit and is called by ctypes: by the GPU's own JPEG engines where it has some.
A batch is decoded whole, boxes are resized on the GPU, and the pixels come back to the host, from where they
go as all images do. Its pixels are not those of a CPU's decoders, so it is a part of a run's identity. What
it is not made for (progressive or rotated JPEGs, CMYK, PNG) is decoded on the host, by a rule that looks at
the file alone. Shapes: C channels, H rows, W columns; a box is top, left, height, width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from functools import cache
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from lockstep.data.decoding.decode import END, is_upright
from lockstep.data.decoding.decode_processes import Box
from lockstep.errors import DataError
from lockstep.kernels.numerics import current_gpu

_NAMES = "libnvjpeg.so.13", "libnvjpeg.so.12", "libnvjpeg.so"
_TOOLKIT = Path("/usr/local/cuda/lib64")  # where it is if the loader does not know
_BACKENDS = {"engines": 3, "kernels": 2}  # of nvjpegCreateEx, the better one first
_BASELINE = 0xC0  # one scan, sequential, coded by Huffman
_FORMATS = {1: 2, 3: 3}  # channels: luminance, or a plane for each colour
_MOST_BYTES = 1 << 29  # of the pixels of a batch


class _Planes(ctypes.Structure):
    _fields_ = (("channel", c_void_p * 4), ("pitch", c_size_t * 4))


class Coded(NamedTuple):
    """A JPEG that nvJPEG takes."""

    data: bytes
    height: int
    width: int


class NvJpeg:
    """One decoder of a process, on its current GPU; `name` says which, for the decode fingerprint."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise DataError(
                "data.decoder=nvjpeg needs an NVIDIA GPU, and there is none: set data.decoder=cpu"
            )
        self._lock, self._lib = Lock(), _load()
        self._quick = ctypes.PyDLL(self._lib._name)  # for calls too short to give up the interpreter's lock
        self._device = current_gpu()
        torch.zeros(1, device=self._device)  # the library needs a CUDA context
        self._handle, self._state, self._header = c_void_p(), c_void_p(), c_void_p()
        made = (
            name
            for name, number in _BACKENDS.items()
            if not self._lib.nvjpegCreateEx(c_int(number), None, None, c_uint(0), byref(self._handle))
        )
        self._backend = next(made, "")
        if not self._backend:
            raise DataError("data.decoder=nvjpeg: nvJPEG cannot use this GPU: set data.decoder=cpu")
        self._call("nvjpegJpegStateCreate", self._handle, byref(self._state))
        self._call("nvjpegJpegStreamCreate", self._handle, byref(self._header))
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        version = [c_int() for _ in range(3)]
        for kind, number in enumerate(version):
            self._call("nvjpegGetProperty", c_int(kind), byref(number))
        numbers = ".".join(str(number.value) for number in version)
        self.name = f"nvjpeg {numbers} by {self._backend} of {torch.cuda.get_device_name(self._device)}"

    def parse(self, data: bytes) -> Coded | None:
        """A JPEG that it can decode, by its header; None if the host has to."""
        if not (data.startswith(b"\xff\xd8") and data.endswith(END) and _is_usual(data) and is_upright(data)):
            return None
        count, kind, other = c_uint(), c_int(), c_int(0)
        width, height = c_uint(), c_uint()
        with self._lock:
            args = self._handle, c_char_p(data), c_size_t(len(data)), self._header
            if self._quick.nvjpegJpegStreamParseHeader(*args):
                return None
            self._quick.nvjpegJpegStreamGetComponentsNum(self._header, byref(count))
            self._quick.nvjpegJpegStreamGetJpegEncoding(self._header, byref(kind))
            self._quick.nvjpegJpegStreamGetFrameDimensions(self._header, byref(width), byref(height))
            if self._backend == "engines":
                self._quick.nvjpegDecodeBatchedSupported(self._handle, self._header, byref(other))
        if count.value not in _FORMATS or kind.value != _BASELINE or other.value:
            return None
        return Coded(data, height.value, width.value)

    def decode(self, files: Sequence[Coded], boxes: Sequence[Box | None], out: Tensor, share: float) -> None:
        """Boxes of images, resized into `out` [N, C, H, W] on the host; the middle without a box."""
        found = [
            box or _middle((file.height, file.width), (out.shape[2], out.shape[3]), share)
            for file, box in zip(files, boxes, strict=True)
        ]
        first, held = 0, 0
        for place, file in enumerate(files):
            held += file.height * file.width * out.shape[1]
            if held > _MOST_BYTES and place > first:
                self._decode(files[first:place], found[first:place], out[first:place])
                first, held = place, file.height * file.width * out.shape[1]
        if files:
            self._decode(files[first:], found[first:], out[first:])

    def _decode(self, files: Sequence[Coded], boxes: Sequence[Box], out: Tensor) -> None:
        channels, rows, cols = out.shape[1:]
        with self._lock, torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            images = [
                torch.empty((channels, file.height, file.width), dtype=torch.uint8, device=self._device)
                for file in files
            ]
            planes, count = (_Planes * len(files))(), len(files)
            for each, image in zip(planes, images, strict=True):
                for channel in range(channels):
                    each.channel[channel] = image[channel].data_ptr()
                    each.pitch[channel] = image.shape[2]
            texts = (c_char_p * count)(*(file.data for file in files))
            lengths = (c_size_t * count)(*(len(file.data) for file in files))
            both, kind = (self._handle, self._state), c_int(_FORMATS[channels])
            self._call("nvjpegDecodeBatchedInitialize", *both, c_int(count), c_int(1), kind)
            where = c_void_p(self._stream.cuda_stream)
            self._call("nvjpegDecodeBatched", *both, texts, lengths, planes, where)
            result = torch.empty_like(out, device=self._device)
            for place, (image, box) in enumerate(zip(images, boxes, strict=True)):
                top, left, height, width = box
                part = image[:, top : top + height, left : left + width]
                if part.shape[1:] != (rows, cols):
                    sized = interpolate(part[None].float(), (rows, cols), mode="bilinear", antialias=True)
                    part = sized[0].round_().clamp_(0, 255)
                result[place].copy_(part)
            out.copy_(result)  # waits for all of it

    def _call(self, name: str, *args: object) -> None:
        if status := getattr(self._lib, name)(*args):
            raise DataError(f"{name} failed with status {status}: set data.decoder=cpu")


@cache
def find_nvjpeg() -> NvJpeg:
    """The decoder of this process."""
    return NvJpeg()


def _load() -> ctypes.CDLL:
    for name in (*_NAMES, *(str(_TOOLKIT / name) for name in _NAMES)):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise DataError(
        "data.decoder=nvjpeg: there is no libnvjpeg: install the CUDA toolkit, or set data.decoder=cpu"
    )


def _is_usual(data: bytes) -> bool:
    """Whether colours are coded as luminance and chrominance, as nearly always."""
    place = data.find(b"Adobe", 0, 1 << 16)
    return place < 0 or data[place + 11 : place + 12] != b"\0"


def _middle(size: tuple[int, int], shape: tuple[int, int], share: float) -> Box:
    """A share of the largest box in the middle that is as wide for its height as the shape."""
    (height, width), (rows, cols) = size, shape
    tall, wide = (
        (height, height * cols // rows) if width * rows >= height * cols else (width * rows // cols, width)
    )
    tall, wide = max(round(tall * share), 1), max(round(wide * share), 1)
    return (height - tall) // 2, (width - wide) // 2, tall, wide
