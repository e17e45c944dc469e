"""A run at Weights & Biases: its own variables say where (WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.cli.watch.follow import Point


class WandbRun:
    """A tracker of one run, in the process that follows it."""

    def open(self, folder: Path, told: Mapping[str, Any], known: str) -> tuple[str, str]:
        """Begin a run, or go on with the `known` one; gives its id, and where to look at it."""
        import wandb

        settings = wandb.Settings(console="off", disable_code=True)
        self._run: Any = wandb.init(
            dir=folder,
            name=told["name"],
            id=known or None,
            resume="allow",
            config=told["settings"],
            settings=settings,
        )
        return self._run.id, self._run.url or str(Path(self._run.dir).parent)

    def log(self, points: list[Point]) -> None:
        """Take measurements; those of one step are one row there."""
        for step, values in points:
            self._run.log(values, step=step)

    def close(self, state: str, summary: Mapping[str, Any]) -> None:
        """End the run; a stopped one is there as preempted, for it may be resumed."""
        self._run.summary.update({**summary, "state": state})
        if state == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if state == "finished" else 1)
