"""What is asked of images in inference: labels and logits, and how near these are."""

from __future__ import annotations

import torch

from lockstep.kernels.device.loss import cross_entropy
from lockstep.kernels.device.watch import watch_compiler


class Scored:
    """Buffers for `lanes` blocks of `lane_size` images."""

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
