"""A strategy for Lightning: an unchanged `LightningModule`, and the same bits by any number of workers.

from lockstep.lightning import LaneStrategy

trainer = Trainer(strategy=LaneStrategy(lanes=8, seed=0), accelerator="cpu", devices=4)
"""

from __future__ import annotations

from lockstep.spec.system import extra_command

try:
    import lightning.pytorch  # noqa: F401
except ImportError as missing:
    raise ImportError(f"lockstep.lightning needs: {extra_command('lightning')}") from missing

from lockstep.lightning.lane_strategy import LaneStrategy

__all__ = ["LaneStrategy"]
