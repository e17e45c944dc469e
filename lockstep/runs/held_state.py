"""What the workers of a lost group have of a state in parts, of which step, and how new parts get it."""

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
    # commits a further step, given the norm of its gradients; returns the pieces after it
    finish: Callable[[torch.Tensor], list[StatePiece]] | None
    norm: torch.Tensor | None  # of the last step


def hold(state: TrainState) -> HeldState:
    """Keep what a worker has of a state."""
    pieces, commit = state.pieces(), state.finish
    shapes = state.parts.known if state.parts else {piece.name: piece.shape for piece in pieces}

    def finish(norm: torch.Tensor) -> list[StatePiece]:
        assert commit
        commit(norm)
        return state.pieces()  # what compression remembers has come to other tensors

    return HeldState(state.cursor(), pieces, shapes, finish if commit else None, state.norm)


@dataclass(frozen=True)
class _Run:
    """Elements of a tensor that a worker has."""

    rank: int
    start: int
    stop: int


class HeldParts:
    """The parts of all workers of a new group, as they were held; the same on every worker. A collective.

    They are of the latest step of which the workers have everything together, with their copies.
    """

    def __init__(
        self,
        group: Group,
        live: HeldState | None,
        copies: Sequence[HeldState] = (),
        has_trained: bool = False,
    ) -> None:
        self.group, self.source = group, 0  # a worker that has committed the latest step
        live = self._catch_up(live)
        mine = [*([live] if live else []), *copies]
        told = [
            {
                "cursor": each.cursor,
                "places": [[piece.name, piece.start, piece.tensor.numel()] for piece in each.pieces],
                "shapes": each.shapes,
            }
            for each in mine
        ]
        found = [
            json.loads(text) for text in group.all_gather_bytes(json.dumps([has_trained, told]).encode())
        ]
        every = [rows for _, rows in found]
        steps = sorted({row["cursor"]["step"] for rows in every for row in rows}, reverse=True)
        self.cursor: dict[str, Any] | None = None  # if together they have all of a state
        self._held: dict[str, list[_Run]] = {}
        self.latest = steps[0] if steps else -1  # the last step that anybody has, or had a copy of
        self.has_trained = self.latest > 0 or any(each for each, _ in found)  # since it has a model
        for step in steps:
            if self.cursor is None:
                self.cursor = self._gather(every, step)
        chosen = [each for each in reversed(mine) if each.cursor["step"] == self.step]
        self._mine = {(piece.name, piece.start): piece.tensor for each in chosen for piece in each.pieces}
        is_chosen = live is not None and live.cursor["step"] == self.step
        self.live = replace(live, cursor=self.cursor) if live and self.cursor and is_chosen else None

    @property
    def step(self) -> int:
        """The step that all go on from; -1 if they have all of none."""
        return int(self.cursor["step"]) if self.cursor else -1

    @property
    def is_lost(self) -> bool:
        """Whether steps were done, and all of what the workers had is not enough to go on from any."""
        return self.cursor is None and self.has_trained

    def explain(self, step: int, undone: int) -> str:
        """From where the state of a step came, after workers were lost or joined, and what is done again."""
        if self.cursor and self.step == self.latest and not undone:
            return f"the workers have all of the state, and go on from step {step}"
        back = f"go back {undone} step{'s' * (undone != 1)} to" if undone else "go on from"
        kind = "copy" if self.cursor else "checkpoint"
        return f"a part of the state is lost, and all {back} the {kind} of step {step}"

    def _gather(self, every: list[list[dict[str, Any]]], step: int) -> dict[str, Any] | None:
        """Note who has what of the state of a step; gives its cursor if nothing is missing."""
        found = [(rank, row) for rank, rows in enumerate(every) for row in rows]
        found = [(rank, row) for rank, row in found if row["cursor"]["step"] == step]
        self._held = {}
        for rank, row in found:
            for name, start, count in row["places"]:
                self._held.setdefault(name, []).append(_Run(rank, start, start + count))
        _, first = min(found, key=lambda each: each[0] != self.source)
        sizes = {name: torch.Size(shape).numel() for name, shape in first["shapes"].items()}
        is_whole = all(self._ways(name, 0, size) is not None for name, size in sizes.items())
        return dict(first["cursor"]) if is_whole else None

    def _catch_up(self, mine: HeldState | None) -> HeldState | None:
        """Commit a step that others have committed, if only the norm of its gradients was missing."""
        norm = mine.norm.item() if mine and mine.norm is not None else None
        told = [mine.cursor["step"], norm] if mine else [-1, None]
        every = [json.loads(text) for text in self.group.all_gather_bytes(json.dumps(told).encode())]
        self.source = max(range(len(every)), key=lambda rank: (every[rank][0], -rank))
        step, norm = every[self.source]
        if mine and mine.finish and mine.cursor["step"] < step and norm is not None:
            device = mine.pieces[0].tensor.device
            pieces = mine.finish(torch.tensor(norm, dtype=torch.float32, device=device))
            return replace(mine, cursor={**mine.cursor, "step": step}, pieces=pieces, finish=None)
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
