"""What the stages of a pipeline tell each other at the end of a step, so that all decide alike."""

from __future__ import annotations

import json
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.comm.group import Group


class StageNumbers(NamedTuple):
    """The numbers of one stage: means over lanes, and for clipping the `chunk_sums` of its gradients."""

    loss: float
    correct: float
    stops: float
    moves: float
    is_finite: bool  # all but the gradients, and the gradients
    fits: bool
    chunks: dict[tuple[str, int], Tensor]  # by name and first element


def merge_stages(group: Group, mine: StageNumbers) -> StageNumbers:
    """The numbers of the whole model: loss and right answers of the last stage; a collective.

    `group` are workers that have all parts of the model together, those of the last stage at the end.
    """
    device = next((sums.device for sums in mine.chunks.values()), torch.device("cpu"))
    told = [*mine[:-1], [[*place, sums.tolist()] for place, sums in mine.chunks.items()]]
    every = [json.loads(text) for text in group.all_gather_bytes(json.dumps(told).encode())]
    stages = [mine._replace(**dict(zip(StageNumbers._fields[:-1], found, strict=False))) for found in every]
    chunks = {
        (name, first): torch.tensor(sums, dtype=torch.float32, device=device)
        for *_, found in every
        for name, first, sums in found
    }
    return StageNumbers(
        stages[-1].loss,
        stages[-1].correct,
        max(stage.stops for stage in stages),
        max(stage.moves for stage in stages),
        all(stage.is_finite for stage in stages),
        all(stage.fits for stage in stages),
        chunks,
    )
