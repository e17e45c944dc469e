"""The grid of a run: sums over pixels follow train.bands, those over outputs train.slices, by one worker too."""

from __future__ import annotations

from torch import nn

from lockstep.errors import ModelError
from lockstep.lower.fixed_lane import fixed_images
from lockstep.lower.program import DeviceLowering
from lockstep.parallel.split.axes import Axes
from lockstep.parallel.split.split_graph import SplitGraph
from lockstep.parallel.split.split_model import split_model
from lockstep.spec import Run


def make_grid(
    run: Run, model: nn.Module, shape: tuple[int, ...], lowering: DeviceLowering | None
) -> SplitGraph | None:
    """The model with its sums in the grid, by one worker; None without a grid."""
    train = run.train
    if train.bands == train.slices == 1:
        return None
    if lowering:
        raise ModelError(
            f"train.bands={train.bands}, train.slices={train.slices}: {lowering.program.kernels} kernels "
            "have no such grid: use kernels.set=stock, which is another run"
        )
    images = fixed_images(run, shape, next(model.parameters()).device)
    return split_model(model, Axes(train.bands, train.slices), images, train.precision == "bf16")
