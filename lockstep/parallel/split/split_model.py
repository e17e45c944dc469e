"""A model over the workers that share a lane, with what the probes found."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.measure.machine_fingerprint import lane_hash
from lockstep.models.tensors import buffers_kept
from lockstep.parallel.split.axes import Axes
from lockstep.parallel.split.layer_report import list_cells
from lockstep.parallel.split.probes.cell_probe import CellProbe
from lockstep.parallel.split.probes.plan_probe import PlanProbe, compute_layers
from lockstep.parallel.split.split_graph import SplitGraph


def split_model(
    model: nn.Module, axes: Axes, images: Tensor, half: torch.dtype | None, alone: SplitGraph | None = None
) -> SplitGraph:
    """The calls of a model in training mode, dealt out; `images` are shaped as a lane. A collective.

    `alone` is the same by one worker, if that is known already.
    """
    model.train()
    with buffers_kept(model):
        if alone is None:
            alone = SplitGraph(model, axes.alone(), images, CellProbe(half, images.device).check, half)
        if axes.is_one_worker:
            return alone
        with torch.enable_grad():
            return SplitGraph(model, axes, images, PlanProbe(alone, half).check, half)


def plan_model(model: nn.Module, axes: Axes, images: Tensor, half: torch.dtype | None) -> SplitGraph:
    """The same by rules and by one worker's probe alone: no other worker is asked."""
    model.train()
    with buffers_kept(model):
        return SplitGraph(model, axes, images, CellProbe(half, images.device).check, half)


def grid_facts(graph: SplitGraph, half: torch.dtype | None) -> dict[str, Any]:
    """The part of the numerics fingerprint of a run with a grid, where one worker computes all.

    `cells` are those parts of layers that are computed band by band or by slices of channels, as their
    kernels would give other bits otherwise. `lane` is a hash of every kind of layer, one at a time: a whole
    lane may be too large.
    """
    with buffers_kept(graph.model), torch.enable_grad():
        return {"cells": list_cells(graph), "lane": lane_hash(compute_layers(graph, half))}
