"""How workers agree, at the start and the end: same identity, same state; a joining one is sent the state.

An error of one worker is raised by all workers, and names that worker.
"""

from __future__ import annotations

import json
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import lockstep
from lockstep.comm.everywhere import everywhere
from lockstep.comm.group import Group
from lockstep.errors import LockstepError, WorkersDiffer
from lockstep.models.tensors import model_tensors
from lockstep.runs.about import about_row
from lockstep.runs.checkpoint import Saved
from lockstep.runs.held_state import HeldParts
from lockstep.runs.journal import Journal
from lockstep.runs.state_parts import StateParts, StatePiece
from lockstep.runs.train_state import TrainState, hash_state
from lockstep.spec import Launch
from lockstep.spec.identity import HISTORY, INITIAL_WEIGHTS, Identity, digest
from lockstep.train.setup import Setup

# Taken from worker 0 and not compared: each worker's copy of a user's module may start from other weights,
# and only worker 0 knows which data a resumed run had before.
_BROADCAST = (INITIAL_WEIGHTS, HISTORY)


def prove_identity(group: Group, identity: Identity, launch: Launch) -> Identity:
    """Worker 0's identity, if all workers have the same; else an error names the field and the worker."""
    told = {"host": socket.gethostname(), "identity": _told(identity, launch)}
    message = json.dumps(told).encode()
    first, *others = map(json.loads, group.all_gather_bytes(message))
    for rank, other in enumerate(others, 1):
        hosts = f"worker {rank} on {other['host']}", f"worker 0 on {first['host']}"
        _compare(first["identity"], other["identity"], *hosts)
    shared: Identity = json.loads(group.broadcast_bytes(json.dumps(identity).encode()))
    return shared


def compare_identities(theirs: Identity, own: Identity) -> None:
    """Refuse to join a job whose identity differs from this worker's."""
    try:
        _compare(_compared(theirs), _compared(own), f"this worker on {socket.gethostname()}", "the job")
    except WorkersDiffer as error:
        error.everywhere = False  # the others train on
        raise


@dataclass(frozen=True)
class RollCall:
    """What each worker of a new group already has, in order of rank; the same on every worker."""

    answers: list[dict[str, Any]]

    @property
    def agrees(self) -> bool:
        """Whether all have built the same run."""
        built = {answer["built"] for answer in self.answers}
        return len(built) == 1 and built != {""}

    @property
    def has_directory(self) -> bool:
        """Whether worker 0 has the run's directory open, and all workers know its path."""
        return bool(self.answers[0]["keeps"]) and all(answer["knows"] for answer in self.answers)

    @property
    def source(self) -> int | None:
        """The worker to take the state from: the first with the latest step; None if no worker has any."""
        cursors = [answer["cursor"] for answer in self.answers]
        places = [(c["epoch"], c["step_in_epoch"]) if c else (-1, -1) for c in cursors]
        return places.index(max(places)) if max(places) > (-1, -1) else None

    @property
    def is_even(self) -> bool:
        """Whether all have a state of the same step, so that nothing need be sent."""
        first = self.answers[0]["cursor"]
        return first is not None and all(answer["cursor"] == first for answer in self.answers)


def call_roll(group: Group, mine: dict[str, Any]) -> RollCall:
    """Gather all answers in one call, since recovery from a loss should be fast."""
    return RollCall([json.loads(text) for text in group.all_gather_bytes(json.dumps(mine).encode())])


def answer_roll(
    setup: Setup | None, launch: Launch, state: TrainState | None, journal: Journal | None
) -> dict[str, Any]:
    """What this worker has: a built run, a state, the run's directory open, and its path."""
    keeps, knows = bool(journal and journal.is_open), bool(journal and journal.found)
    built = digest(_told(setup.identity, launch)) if setup else ""
    return {"built": built, "cursor": state.cursor() if state else None, "keeps": keeps, "knows": knows}


def share_state(group: Group, state: TrainState, source: int) -> None:
    """Copy one worker's state to all workers, and prove that it arrived.

    A worker changes its own state only once all tensors are here, since the sender may die half way.
    """
    if group.size == 1:
        return
    cursor = json.loads(group.broadcast_bytes(json.dumps(state.cursor()).encode(), source))
    arrived = state.named()
    if group.rank != source:
        arrived = {name: torch.empty_like(tensor) for name, tensor in arrived.items()}
    for tensor in arrived.values():
        group.broadcast(tensor, source)
    if group.rank != source:
        state.load_tensors(arrived)
        state.load_cursor(cursor)
    prove_state(group, state)


def begin_parts(
    group: Group,
    setup: Setup,
    begin: Callable[[], TrainState],
    held: HeldParts,
    saved: Saved | None,
    journal: Journal,
) -> TrainState:
    """A state of which each worker may have a part.

    It comes from what the workers held together, or from the checkpoint that worker 0 found, or from the
    model of worker 0. `begin` keeps this worker's part of the model.
    """
    cursor = json.loads(group.broadcast_bytes(json.dumps(saved and saved.manifest["cursor"]).encode()))
    if not held.cursor and not cursor:
        if held.is_lost and setup.is_own_model:
            error = LockstepError(
                "a part of the state is lost, no checkpoint was saved, and the script's module cannot begin "
                "again in its process: run the script again"
            )
            error.everywhere = True
            raise error
        for tensor in model_tensors(setup.model).values():
            group.broadcast(tensor.detach())
    state = begin()
    parts, own = state.parts or StateParts(group), state.pieces()
    shapes = parts.shapes(own)
    if held.cursor:
        _hand_over(held, own, journal)
    elif cursor:
        everywhere(group, lambda: saved.check(shapes) if saved else None)
        parts.hand_out(own, saved.tensors if saved else None)
    state.load_cursor(held.cursor or cursor or state.cursor())
    return state


def give_parts(held: HeldParts, journal: Journal | None) -> None:
    """Hand over what this worker has, as one that does not train on; the others call `begin_parts`."""
    if held.cursor:
        _hand_over(held, (), journal)


def _hand_over(held: HeldParts, own: Sequence[StatePiece], journal: Journal | None) -> None:
    """Copy what all held into new parts; nobody forgets what it held before all have theirs."""
    held.move(own)
    _share_rows(held.group, journal, held.source)
    held.group.barrier()


def _share_rows(group: Group, journal: Journal | None, source: int) -> None:
    """Get the latest rows of a worker that has committed the latest step, in case worker 0 has not."""
    noted = journal.noted if journal else deque()
    rows = json.loads(group.broadcast_bytes(json.dumps(list(noted)).encode(), source))
    known = [(name, *about_row(row)) for name, row in noted]
    noted.extend((name, row) for name, row in rows if (name, *about_row(row)) not in known)


def prove_state(group: Group, state: TrainState) -> dict[str, str]:
    """The hashes of the state; an error if they differ between workers that have the same part of it."""
    if not state.parts:
        hashes = state.hashes()
        _compare_hashes(group, hashes, state.step)
        return hashes
    _compare_hashes(state.parts.same, hash_state(sorted(state.common().items())), state.step)
    found: dict[str, str] = json.loads(group.broadcast_bytes(json.dumps(state.hashes()).encode()))
    return found


def _compare_hashes(group: Group, hashes: dict[str, str], step: int) -> None:
    for rank, text in enumerate(group.all_gather_bytes(json.dumps(hashes).encode())):
        differs = [key for key, value in json.loads(text).items() if hashes.get(key) != value]
        if differs:
            raise _differ(
                f"step {step}: worker {rank} has another {differs[0]} than worker {group.rank}: memory or a "
                "computation was corrupted, or an integer buffer of the model depends on the data"
            )


def _told(identity: Identity, launch: Launch) -> Identity:
    plans = " or ".join(map(str, launch.plans))
    told = {"lockstep": lockstep.__version__, "--bucket-mb": launch.bucket_mb, "--plan": plans}
    return {**told, **_compared(identity)}


def _compared(identity: Identity) -> Identity:
    return {key: value for key, value in identity.items() if key not in _BROADCAST}


def _compare(ours: Identity, theirs: Identity, who: str, whom: str) -> None:
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key, "absent") != theirs.get(key, "absent"):
            raise _differ(
                f"{who} has {key}={_short(theirs.get(key, 'absent'))}, {whom} has "
                f"{_short(ours.get(key, 'absent'))}: all workers must agree, or the bits would differ; start "
                "them with the same Run, data and packages"
            )


def _differ(text: str) -> WorkersDiffer:
    error = WorkersDiffer(text)
    error.exit_code = 2
    return error


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
