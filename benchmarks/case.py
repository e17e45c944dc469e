"""What is trained and who trains it: the values that gpu_step.py, its peers and their timing share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """What is trained: images are uint8 [num_images, in_channels, size, size], random."""

    model: str
    batch: int
    precision: str  # bf16, tf32 or fp32
    size: int
    in_channels: int
    num_classes: int
    num_images: int

    @property
    def num_batches(self) -> int:
        """Whole batches of an epoch."""
        return self.num_images // self.batch


@dataclass(frozen=True)
class Job:
    """A case, and who trains it."""

    case: Case
    variant: str
    lanes: int = 1
    rounds: int = 5
    device: str = "cuda"
    kernels: str = "auto"  # of this engine
