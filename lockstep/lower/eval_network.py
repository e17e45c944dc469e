"""The interface of a network in eval mode, from images to logits and each sample's loss, and its buffers.

Evaluation and prediction use it. Every program builds one, or its training network has this interface too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lockstep.kernels.triton.compiler_watch import watch_compiler
from lockstep.kernels.triton.softmax_loss import cross_entropy


class EvalNetwork(Protocol):
    """`lanes` blocks of `lane_size` images, and their scores."""

    lanes: int
    lane_size: int
    x: list[Tensor]  # the first tensor is the images, N H W C, inside a border of `pad` zeros
    labels: Tensor
    logits: Tensor
    loss: Tensor
    right: Tensor

    @property
    def pad(self) -> tuple[int, int]: ...

    def forward(self, training: bool) -> None:
        """Images → logits."""

    def score(self) -> None:
        """Logits and labels → each sample's loss, and whether it is right."""

    def enter(self, given: Sequence[Tensor]) -> None:
        """Take images [N, H, W, C], or what the part before has sent."""

    def leave(self) -> list[Tensor]:
        """What the part after it needs."""

    def make_weights(self) -> None:
        """Have memory for weights again, after `drop_tables`."""

    def drop_tables(self) -> None:
        """Free the weights."""


class ScoreBuffers:
    """Labels, logits and scores of `lanes` blocks of `lane_size` images."""

    def __init__(
        self, lanes: int, lane_size: int, classes: int, smoothing: float, device: torch.device
    ) -> None:
        watch_compiler()
        self.lanes, self.lane_size, self._smoothing = lanes, lane_size, smoothing
        count = lanes * lane_size
        self.labels = torch.zeros(count, dtype=torch.int32, device=device)
        self.logits, self._grad = (torch.zeros(count, classes, device=device) for _ in range(2))
        self.loss, self.right = (torch.zeros(count, device=device) for _ in range(2))

    def score(self) -> None:
        """Logits and labels → each sample's loss, and whether it is right."""
        cross_entropy(
            self.logits, self.labels, self.loss, self.right, self._grad, self.lane_size, self._smoothing
        )
