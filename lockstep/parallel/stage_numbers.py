"""What the stages of a pipeline tell each other at the end of a step, so that all decide alike."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import torch

from lockstep.comm.group import Group


class StageNumbers(NamedTuple):
    """The numbers of one stage: means over lanes, and for clipping the `chunk_sums` of its gradients."""

    loss: float
    correct: float
    stops: float
    moves: float
    is_finite: bool
    chunks: dict[str, Any]  # tensors; lists on the way


def merge_stages(pipeline: Group, mine: StageNumbers) -> StageNumbers:
    """The numbers of the whole model: loss and right answers of the last stage; a collective."""
    device = next((sums.device for sums in mine.chunks.values()), torch.device("cpu"))
    told = mine._replace(chunks={name: sums.tolist() for name, sums in mine.chunks.items()})
    stages = [
        StageNumbers(*json.loads(text)) for text in pipeline.all_gather_bytes(json.dumps(told).encode())
    ]
    chunks = {
        name: torch.tensor(sums, dtype=torch.float32, device=device)
        for stage in stages
        for name, sums in stage.chunks.items()
    }
    return StageNumbers(
        stages[-1].loss,
        stages[-1].correct,
        max(stage.stops for stage in stages),
        max(stage.moves for stage in stages),
        all(stage.is_finite for stage in stages),
        chunks,
    )
