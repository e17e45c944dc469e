"""What the workers of a lost group still have of a state in parts: is it all, and how new parts get it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lockstep.comm.group import Group
from lockstep.runs.state_parts import StatePiece
from lockstep.runs.train_state import TrainState


@dataclass(frozen=True)
class HeldState:
    """One worker's part of a state, after its group has ended."""

    cursor: dict[str, Any]
    pieces: list[StatePiece]
    shapes: dict[str, tuple[int, ...]]  # of all tensors of the state
    finish: Callable[[torch.Tensor], object] | None  # commits a further step, given the norm of its gradients
    norm: torch.Tensor | None  # of the last step


def hold(state: TrainState) -> HeldState:
    """Keep what a worker has of a state."""
    pieces = state.pieces()
    shapes = state.parts.known if state.parts else {piece.name: piece.shape for piece in pieces}
    return HeldState(state.cursor(), pieces, shapes, state.finish, state.norm)


@dataclass(frozen=True)
class _Run:
    """Elements of a tensor that a worker has."""

    rank: int
    start: int
    stop: int


class HeldParts:
    """The parts of all workers of a new group, as they were held; the same on every worker. A collective."""

    def __init__(self, group: Group, mine: HeldState | None) -> None:
        self.group, self.source = group, 0  # a worker that has committed the latest step
        mine = self._catch_up(mine)
        self._mine = {(piece.name, piece.start): piece.tensor for piece in mine.pieces} if mine else {}
        places = [[piece.name, piece.start, piece.tensor.numel()] for piece in mine.pieces] if mine else []
        told = {"cursor": mine.cursor, "places": places, "shapes": mine.shapes} if mine else None
        every = [json.loads(text) for text in group.all_gather_bytes(json.dumps(told).encode())]
        steps = [found["cursor"]["step"] if found else -1 for found in every]
        self._held: dict[str, list[_Run]] = {}
        self.cursor: dict[str, Any] | None = None  # if together they have all of a state
        if max(steps) < 0:
            return
        for rank, found in enumerate(every):
            for name, start, count in found["places"] if steps[rank] == max(steps) else ():
                self._held.setdefault(name, []).append(_Run(rank, start, start + count))
        latest = every[self.source]
        sizes = {name: torch.Size(shape).numel() for name, shape in latest["shapes"].items()}
        if all(self._ways(name, 0, size) is not None for name, size in sizes.items()):
            self.cursor = latest["cursor"]

    def _catch_up(self, mine: HeldState | None) -> HeldState | None:
        """Commit a step that others have committed, if only the norm of its gradients was missing."""
        norm = mine.norm.item() if mine and mine.norm is not None else None
        told = [mine.cursor["step"], norm] if mine else [-1, None]
        every = [json.loads(text) for text in self.group.all_gather_bytes(json.dumps(told).encode())]
        self.source = max(range(len(every)), key=lambda rank: (every[rank][0], -rank))
        step, norm = every[self.source]
        if mine and mine.finish and mine.cursor["step"] < step and norm is not None:
            mine.finish(torch.tensor(norm, dtype=torch.float32, device=mine.pieces[0].tensor.device))
            return replace(mine, cursor={**mine.cursor, "step": step}, finish=None)
        return mine

    def move(self, own: Sequence[StatePiece]) -> None:
        """Copy what was held into new parts; a collective."""
        mine = {(piece.name, piece.start): piece.tensor for piece in own}
        wanted = [[p.name, p.start, p.tensor.numel()] for p in own]
        every = [json.loads(text) for text in self.group.all_gather_bytes(json.dumps(wanted).encode())]
        moves = sorted(
            (name, rank, start, count) for rank, found in enumerate(every) for name, start, count in found
        )
        for name, rank, start, count in moves:
            target = mine[name, start].detach() if rank == self.group.rank else None
            flat = None if target is None else torch.empty(count, dtype=target.dtype)
            for way in self._ways(name, start, start + count, rank) or ():
                part = None if flat is None else flat[way.start - start : way.stop - start]
                if way.rank == self.group.rank:
                    source = self._find(name, way)
                    if part is None:
                        self.group.send(source, rank)
                    else:
                        part.copy_(source)
                elif part is not None:
                    self.group.recv(part, way.rank)
            if target is not None and flat is not None:
                target.copy_(flat.view(target.shape))

    def _ways(self, name: str, start: int, stop: int, prefer: int = -1) -> list[_Run] | None:
        """From whom to take elements of a tensor; None if nobody has some of them."""
        found: list[_Run] = []
        at = start
        while at < stop or not found:
            holders = [
                run for run in self._held.get(name, ()) if run.start <= at < max(run.stop, run.start + 1)
            ]
            if not holders:
                return None
            best = max(holders, key=lambda run: (run.rank == prefer, min(run.stop, stop), -run.rank))
            found.append(_Run(best.rank, at, min(best.stop, stop)))
            at = best.stop
        return found

    def _find(self, name: str, way: _Run) -> torch.Tensor:
        """Elements of a tensor that this worker held."""
        for (held, start), tensor in self._mine.items():
            if held == name and start <= way.start and way.stop <= start + tensor.numel():
                return tensor.detach().cpu().contiguous().view(-1)[way.start - start : way.stop - start]
        raise AssertionError(name)
