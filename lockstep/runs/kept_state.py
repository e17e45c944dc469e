"""What a worker keeps of a state in parts from one group to the next: as it was left, and copies of it.

Every so many steps each worker copies what it has, and another one keeps a copy of what only it has. If it is
lost, all go back to that step; no file is read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch

from lockstep.comm.group import Group
from lockstep.comm.transport import Round
from lockstep.runs.held_state import HeldParts, HeldState, hold
from lockstep.runs.state_parts import StatePiece
from lockstep.runs.train_state import TrainState

_Place = tuple[str, tuple[int, ...], int, int, str]  # name, whole shape, first element, how many, dtype


class KeptState:
    """One worker's part of the state after its group, and copies of it and of what others had."""

    def __init__(self, copy_every: int) -> None:
        self._every = copy_every
        self._live: HeldState | None = None
        self._copies: list[HeldState] = []
        self._group, self._copied, self._has_trained = Group(), 0, False
        self.told: list[str] = []  # what copies take, before the first one

    def hold(self, state: TrainState | None) -> None:
        """Keep what is left of a state whose group has ended; what was held before, if there is no state."""
        self._live, self._group = hold(state) if state else self._live, Group()

    def find(self, group: Group) -> HeldParts:
        """What all workers of a new group kept; what they cannot go on from together is forgotten."""
        found = HeldParts(group, self._live, self._copies, self._has_trained)
        self._live, self._has_trained = found.live, found.has_trained
        self._copies = [each for each in self._copies if each.cursor["step"] <= found.step]
        return found

    def release(self) -> None:
        """Forget the state as it was left: a new one has all of it."""
        self._live = None

    def begin(self, group: Group, nodes: Sequence[int], state: TrainState) -> None:
        """Go on with a state in a new group: agree on who keeps whose part of it, and copy it.

        `nodes` has the node of each worker; it is empty if no loss is survived.
        """
        self.release()
        self.told, self._group = [], group if state.feedback and nodes else Group()
        if not self._copies_now:
            self._copies = []
            return
        own = state.pieces()
        places = [(p.name, p.shape, p.start, p.tensor.numel(), _dtype_name(p.tensor)) for p in own]
        every = [json.loads(text) for text in group.all_gather_bytes(json.dumps(places).encode())]
        keepers = choose_keepers(nodes)
        self._to, mine = keepers[group.rank], _known(places)
        self._sent = [place for place in mine if place not in _known(every[self._to])]
        self._received: list[tuple[int, _Place]] = [
            (rank, (name, tuple(shape), start, count, dtype))
            for rank, keeper in enumerate(keepers)
            for name, shape, start, count, dtype in every[rank]
            if keeper == group.rank and (name, start) not in mine
        ]
        is_first = not self._copies
        self.take(state)
        self.told = [self._explain()] if is_first else []

    def is_due_at(self, step: int) -> bool:
        """Whether the state is to be copied after a step."""
        return self._copies_now and step % self._every == 0

    def follow(self, state: TrainState) -> None:
        """Copy the state if that is due; after a round of several steps, if it was after one of them."""
        if self._copies_now and state.step // self._every > self._copied // self._every:
            self.take(state)

    @property
    def _copies_now(self) -> bool:
        return self._every > 0 and self._group.size > 1

    def take(self, state: TrainState) -> None:
        """Copy the state; a collective. The copy before is kept until all workers have the new one."""
        own = [replace(piece, tensor=_copy(piece.tensor)) for piece in state.pieces()]
        known = {(piece.name, piece.start): piece.tensor for piece in own}
        arrived = [
            (rank, StatePiece(name, shape, start, torch.empty(count, dtype=getattr(torch, dtype))))
            for rank, (name, shape, start, count, dtype) in self._received
        ]
        sent = [(self._to, known[place]) for place in self._sent]
        self._group.swap(Round([(r, piece.tensor) for r, piece in arrived], sent), lambda: None, Round())
        self._copied, pieces = state.step, [*own, *(piece for _, piece in arrived)]
        shapes = state.parts.known if state.parts else {}
        self._copies.append(HeldState(deepcopy(state.cursor()), pieces, shapes, None, None))
        self._group.barrier()
        del self._copies[:-1]

    def _explain(self) -> str:
        copy, keys = self._copies[-1], set(self._sent)
        others = {(name, start) for _, (name, _, start, _, _) in self._received}
        own = sum(p.tensor.nbytes for p in copy.pieces if (p.name, p.start) not in others)
        kept = sum(p.tensor.nbytes for p in copy.pieces if (p.name, p.start) in others)
        sent = sum(p.tensor.nbytes for p in copy.pieces if (p.name, p.start) in keys)
        return (
            f"every {self._every} steps (--copy-every) the workers copy their state, for when one is lost: "
            f"worker 0 sends {sent / 1e6:,.1f} MB to worker {self._to}, and keeps {own / 1e6:,.1f} MB of its "
            f"own and {kept / 1e6:,.1f} MB of others in memory, twice that while it copies"
        )


def choose_keepers(nodes: Sequence[int]) -> list[int]:
    """For each worker the one that keeps a copy of its part: on another node, if there are several.

    As many as can be keep one each; of those it is the next worker.
    """
    keepers: list[int] = []
    size = len(nodes)
    for rank, node in enumerate(nodes):
        others = [(rank + distance) % size for distance in range(1, size)]
        elsewhere = [other for other in others if nodes[other] != node]
        keepers.append(min(elsewhere or others, key=keepers.count))
    return keepers


def _known(places: Sequence[Any]) -> dict[tuple[str, int], None]:
    """The keys of pieces, in their order."""
    return {(name, start): None for name, _, start, _, _ in places}


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in logical order, in host memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach()).view(-1)
