"""What a module logs in its lanes, kept until all lanes of all workers can be put together.

Numbers are put together in float64 and a fixed order, so that every number of workers logs the same. A
`Metric` of torchmetrics collects and syncs by itself: one that counts (accuracy, F1, a confusion matrix) is
the same in every bit, one that adds floats may differ in the last ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor
from torchmetrics import Metric

from lockstep.comm.group import Group
from lockstep.comm.tree import tree_sum
from lockstep.errors import DataError
from lockstep.lightning.lane_batch import LaneBatch

_OPTIONS = ("prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx", "rank_zero_only")


@dataclass(frozen=True)
class Noted:
    """One call of `self.log` in a lane: a number, how much it counts, and how to log it, as a JSON text."""

    how: str
    value: Tensor  # float64
    weight: float


class LaneResults(_ResultCollection):
    """Lightning's collection of logged values; inside `noting` numbers are noted and not yet logged."""

    def __init__(self, training: bool, device: torch.device) -> None:
        super().__init__(training)
        self._device = device
        self._noted: list[Noted] | None = None
        self._samples = 1

    @contextmanager
    def noting(self, samples: int) -> Iterator[list[Noted]]:
        """Note what is logged in a lane of so many samples."""
        self._noted, self._samples = [], samples
        try:
            yield self._noted
        finally:
            self._noted = None

    def log(self, fx: str, name: str, value: Any, **options: Any) -> None:
        """Called by `LightningModule.log`."""
        if self._noted is None:
            if options.get("batch_size") is None and isinstance(self.batch, LaneBatch):
                options["batch_size"] = self.batch.samples
            super().log(fx, name, value, **options)
            return
        found = value
        if isinstance(value, Metric):
            super().log(fx, name, value, **options)
            found = value._forward_cache
            has_step = self.training and options["on_step"]  # in an evaluation only the end is logged
            if not (has_step and isinstance(found, Tensor) and found.numel() == 1):
                return
        how = {"fx": fx, "name": name, **{key: options[key] for key in _OPTIONS if key in options}}
        how["reduce_fx"] = getattr(options.get("reduce_fx", "mean"), "__name__", options.get("reduce_fx"))
        how["is_metric"] = isinstance(value, Metric)
        how["dtype"] = "float64" if found.dtype == torch.float64 else "float32"
        number = found.detach().to(self._device, torch.float64).reshape(())
        self._noted.append(Noted(json.dumps(how), number, float(options.get("batch_size") or self._samples)))

    def put(self, text: str, values: Sequence[float], weights: Sequence[float]) -> None:
        """Log the numbers that all lanes noted in the same way, as one."""
        how: dict[str, Any] = json.loads(text)
        dtype, is_metric = getattr(torch, how.pop("dtype")), how.pop("is_metric")
        combined = combine(how["reduce_fx"] if not is_metric else "mean", values, weights)
        value = torch.tensor(combined, dtype=dtype, device=self._device)
        if is_metric:  # what it collects is its own; the value of the step is the mean over lanes
            self[f"{how['fx']}.{how['name']}"]._forward_cache = value
        else:  # in sync already: `sync_dist` with no function does nothing, and Lightning does not ask for it
            weight = int(sum(weights)) if self.training else 1  # an evaluation has this one value
            super().log(**how, value=value, batch_size=weight or 1, sync_dist=True)


def results_of(loop: Any) -> LaneResults:
    """What a loop of Lightning has logged."""
    results = loop._results
    assert isinstance(results, LaneResults)
    return results


class BlockLog:
    """What the blocks of an evaluation note, until its end."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, list[Noted]]] = []  # (batch, lane, what it noted)

    def add(self, batch: int, lane: int, noted: list[Noted]) -> None:
        """Keep what a block noted."""
        self._rows.append((batch, lane, noted))

    def finish(self, group: Group, results: LaneResults) -> None:
        """Log the numbers of all workers' blocks; a collective."""
        found = [noted.value for _, _, row in self._rows for noted in row]
        values = iter(torch.stack(found).tolist() if found else [])
        rows = [[*at, [[n.how, next(values), n.weight] for n in row]] for *at, row in self._rows]
        metrics = sorted(key for key, item in results.items() if not item.is_tensor and not item.has_reset)
        told = [
            json.loads(text)
            for text in group.all_gather_bytes(json.dumps({"rows": rows, "metrics": metrics}).encode())
        ]
        for rank, theirs in enumerate(told):
            if theirs["metrics"] != metrics:
                raise DataError(
                    f"worker {rank} or {group.rank} got no samples in this evaluation, so their metrics "
                    "cannot be put together: evaluate more samples, or train with fewer workers"
                )
        self._rows.clear()
        columns: dict[str, tuple[list[float], list[float]]] = {}
        for _, _, row in sorted((row for theirs in told for row in theirs["rows"]), key=lambda row: row[:2]):
            for how, value, weight in row:
                column = columns.setdefault(how, ([], []))
                column[0].append(value)
                column[1].append(weight)
        for how, (numbers, weights) in columns.items():
            results.put(how, numbers, weights)


def combine(reduce_fx: str, values: Sequence[float], weights: Sequence[float]) -> float:
    """Numbers of lanes as one number: by weight if it is a mean."""
    numbers = torch.tensor(values, dtype=torch.float64)
    name = reduce_fx.lower()
    if name in ("sum", "min", "max"):
        return float(tree_sum(numbers) if name == "sum" else getattr(numbers, name)())
    counts = torch.tensor(weights, dtype=torch.float64)
    return float(tree_sum(numbers * counts) / tree_sum(counts))
