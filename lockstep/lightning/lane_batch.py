"""A batch as one worker has it: its lanes, each collated by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Lane:
    """One lane of a batch: its number, how many samples it has, and what the user's `collate_fn` made."""

    number: int
    samples: int
    data: Any


class LaneBatch:
    """What Lightning carries from the loader to the step in place of a batch.

    Hooks that take a batch, such as `on_train_batch_end`, get this; `[lane.data for lane in batch.lanes]`
    are the parts of the batch that this worker computes. It is no dataclass and no list, which Lightning
    would look into.
    """

    def __init__(self, stage: str, epoch: int, number: int, samples: int, lanes: list[Lane]) -> None:
        self.stage, self.epoch, self.number = stage, epoch, number
        self.samples = samples  # of the whole batch, by all workers
        self.lanes = lanes

    @property
    def place(self) -> tuple[str, int, int]:
        """Which batch it is; keys of random numbers begin with this."""
        return self.stage, self.epoch, self.number


def merge_outputs(outputs: Sequence[Any]) -> Any:
    """What this worker's lanes returned, as if it came from one batch; for `on_..._batch_end` hooks.

    Tensors with a first dim are concatenated, numbers averaged; anything else becomes a list.
    """
    if not outputs or any(output is None for output in outputs):
        return None
    first = outputs[0]
    if isinstance(first, Mapping) and all(output.keys() == first.keys() for output in outputs):
        return {key: merge_outputs([output[key] for output in outputs]) for key in first}
    if isinstance(first, Tensor) and all(output.shape[1:] == first.shape[1:] for output in outputs):
        parts = [output.detach() for output in outputs]
        return torch.cat(parts) if first.dim() else torch.stack(parts).double().mean().to(first.dtype)
    return first if len(outputs) == 1 else list(outputs)
