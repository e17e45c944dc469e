"""A model over the workers that share a lane, with what the probes found."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lockstep.models.tensors import buffers_kept
from lockstep.parallel.split.axes import Axes
from lockstep.parallel.split.probe import CellProbe, PlanProbe
from lockstep.parallel.split.split_graph import SplitGraph


def split_model(model: nn.Module, axes: Axes, images: Tensor, half: bool) -> SplitGraph:
    """The calls of a model in training mode, dealt out; `images` are shaped as a lane. A collective."""
    model.train()
    with buffers_kept(model):
        alone = SplitGraph(model, axes.alone(), images, CellProbe(half, images.device).check)
        if axes.channel.size == axes.spatial.size == 1:
            return alone
        with torch.enable_grad():
            return SplitGraph(model, axes, images, PlanProbe(alone, half).check)


def cells(graph: SplitGraph) -> list[str]:
    """What is computed band by band because its kernels would give other bits otherwise."""
    return [f"{graph.label(i)}.{part}" for i, way in enumerate(graph.ways) for part in sorted(way.by_band)]
