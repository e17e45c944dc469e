"""Shape, strides and type of a tensor: kernels choose their algorithm by strides too, so stages keep them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Form:
    """Shape, strides and type of a tensor without gaps."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Its size in memory."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def dump(self) -> list[Any]:
        """What JSON can hold."""
        return [self.shape, self.stride, str(self.dtype).removeprefix("torch.")]

    @classmethod
    def load(cls, dumped: list[Any]) -> Form:
        """Read what `dump` made."""
        shape, stride, dtype = dumped
        return cls(tuple(shape), tuple(stride), getattr(torch, dtype))

    def empty(self, device: torch.device) -> Tensor:
        """A tensor of this form."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


def form_of(tensor: Tensor) -> Form:
    """The form of a tensor."""
    return Form(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements of a tensor fill a piece of memory, in any order, each once."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != reach:
            return False
        reach *= size
    return True


def flat(tensor: Tensor) -> Tensor:
    """All elements of a tensor without gaps, as they lie in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
