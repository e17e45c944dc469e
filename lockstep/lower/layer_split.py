"""What a lane needs of a model whose layers are over several workers, or summed in a grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

GRADIENTS = "gradients"  # in the place of a layer


class LayerSplit(Protocol):
    """Such a model; `parallel/split` has it."""

    def forward(self, images: Tensor) -> Any:
        """What the model returns, whole."""

    def finish(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A lane's gradients, whole."""

    def places(self, name: str, pixels: bool, device: torch.device) -> Tensor | None:
        """The places of a dropout layer's pixels here, or of its channels; None if it has all of them."""


@dataclass(frozen=True)
class InParts:
    """A tensor, or a view of one, of which every worker has a range along a dimension."""

    tensor: Tensor
    dim: int
    ranges: Sequence[range]


class LaneWorkers(Protocol):
    """The workers that deal out the products of a lane; `parallel/products` has them."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def places(self) -> Mapping[str, int]:
        """For layers of a compiled model: the number of this worker's part (see `product_cut`)."""

    def make_whole(self, layer: str, tensors: Sequence[InParts]) -> None:
        """Fill in what the others have; every worker calls it, for the same tensors."""
