"""Writes and reads safetensors files tensor by tensor, so that no copy of a whole state is needed.

Several processes may fill one file, if they see the same folder: a tensor's place is known beforehand.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGN = 8  # bytes of a header are a multiple of it


@dataclass(frozen=True)
class TensorEntry:
    """Name, type and shape of a tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class TensorWriter:
    """Writes pieces of tensors at their places in a file that is there already; see `begin_tensors`."""

    def __init__(
        self, path: Path, entries: Sequence[TensorEntry], metadata: Mapping[str, str] | None = None
    ) -> None:
        self.path = path
        end = len(_header(entries, metadata))
        self._places: dict[str, tuple[int, int]] = {}
        for entry in entries:
            self._places[entry.name] = end, entry.dtype.itemsize
            end += entry.num_bytes
        self.num_bytes = end
        self._file = path.open("r+b")

    def put(self, name: str, tensor: Tensor, start: int = 0) -> None:
        """Write a tensor, or its elements from `start` on."""
        first, size = self._places[name]
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        self._file.seek(first + start * size)
        self._file.write(data.data)

    def close(self) -> None:
        """Make what was written durable."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def begin_tensors(
    path: Path, entries: Sequence[TensorEntry], metadata: Mapping[str, str] | None = None
) -> None:
    """Make a file for tensors, all of its size, without their values."""
    with path.open("wb") as file:
        file.write(_header(entries, metadata))
        size = file.tell() + sum(entry.num_bytes for entry in entries)
        os.posix_fallocate(file.fileno(), 0, size)  # so that a full disk is told before anything is sent


class TensorFile(Mapping[str, Tensor]):
    """The tensors of a safetensors file, each read when it is asked for."""

    def __init__(self, path: Path) -> None:
        opened: Any = safe_open(path, framework="pt")
        self._file, self._names = opened, dict.fromkeys(opened.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        found: Tensor = self._file.get_tensor(name)
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, which is not read."""
        return tuple(self._file.get_slice(name).get_shape())

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _header(entries: Sequence[TensorEntry], metadata: Mapping[str, str] | None) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for entry in entries:
        first, end = end, end + entry.num_bytes
        header[entry.name] = {
            "dtype": _TYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [first, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    return len(text).to_bytes(8, "little") + text
