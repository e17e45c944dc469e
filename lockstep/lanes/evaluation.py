"""Evaluation in a user's own loop: each worker takes some blocks of a data set; the sums are the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lockstep.comm.group import Group
from lockstep.comm.tree import tree_sum, worker_lanes
from lockstep.errors import LockstepError
from lockstep.kernels.keyed_seed import seed_all
from lockstep.kernels.structure import place
from lockstep.lanes.lane_loader import KeyedSamples
from lockstep.lanes.script import Script


class BlockSums:
    """Iterate to get this worker's blocks, `add` numbers for each; then `sums[name]` is over all blocks.

    Blocks are consecutive samples, `batch` each, the last one fewer. Their numbers are added in a fixed
    order, in float64.
    """

    def __init__(
        self,
        script: Script,
        dataset: Any,
        batch: int,
        collate: Callable[[list[Any]], Any] | None,
        processes: int,
    ) -> None:
        self._script, self._dataset, self._batch = script, dataset, batch
        self._collate, self._processes = collate, processes
        self._added: dict[str, float] | None = None
        self._sums: dict[str, float] | None = None

    def add(self, **values: Tensor | float) -> None:
        """Note numbers of the present block, such as how many samples were right, and how many there are."""
        if self._added is None:
            raise LockstepError("sums.add: call it inside the loop over the blocks")
        for name, value in values.items():
            self._added[name] = self._added.get(name, 0.0) + float(value)

    def __getitem__(self, name: str) -> float:
        if self._sums is None:
            raise LockstepError(f"sums['{name}'] is known after the loop over the blocks")
        return self._sums[name]

    def __iter__(self) -> Iterator[Any]:
        rounds = self._script.rounds
        recorded = rounds.skip("evaluation")
        if recorded is not None:
            self._sums = recorded
            return
        yield from rounds.passes(self._run)
        assert self._sums is not None
        rounds.record("evaluation", self._sums)

    def _run(self, group: Group) -> Iterator[Any]:
        script, blocks = self._script, -(-len(self._dataset) // self._batch)
        before = [buffer.clone() for buffer in script.buffers.all()]
        own, rows = worker_lanes(blocks, group.size, group.rank), []
        try:
            for number, block in zip(own, self._read(own), strict=True):
                self._added = {}
                seed_all(script.device, "block", script.seed, script.rounds.cursor.step, number)
                yield place(block, script.device)
                rows.append(self._added)
        finally:
            self._added = None
            script.buffers.restore(before)  # each worker saw other blocks
        found = [
            row for text in group.all_gather_bytes(json.dumps(rows).encode()) for row in json.loads(text)
        ]
        names = {name: None for row in found for name in row}
        table = torch.tensor([[row.get(name, 0.0) for name in names] for row in found], dtype=torch.float64)
        self._sums = dict(zip(names, tree_sum(table).tolist(), strict=True)) if found else {}
        seed_all(script.device, "after block", script.seed, script.rounds.cursor.step)

    def _read(self, own: range) -> Iterator[Any]:
        size, length = self._batch, len(self._dataset)
        blocks = [list(range(n * size, min((n + 1) * size, length))) for n in own]
        return iter(
            DataLoader(
                KeyedSamples(self._dataset, self._script.seed, -1),
                batch_sampler=blocks,
                collate_fn=self._collate,
                num_workers=self._processes,
                generator=torch.Generator(),
            )
        )
