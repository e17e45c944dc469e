"""A state that comes from another worker: whole, or not at all."""

import json

import pytest
import torch
from torch import nn
from world import in_threads

from lockstep.errors import GroupLost
from lockstep.runs.train_state import TrainState
from lockstep.spec import Optimizer
from lockstep.train.handshake import share_state


def make_state(seed, step):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    state = TrainState.begin(model, Optimizer("momentum"), 0.9)
    state.step = step
    return state


def test_it_arrives_whole():
    states = [make_state(rank, 5 + rank) for rank in range(3)]

    def work(group):
        state = states[group.rank]
        share_state(group, state, 1)
        return state.hashes(), state.step

    assert in_threads(3, work) == [(make_state(1, 6).hashes(), 6)] * 3


def test_a_worker_that_dies_half_way_changes_nothing():
    states = [make_state(rank, 5 + rank) for rank in range(2)]

    def work(group):
        state = states[group.rank]
        if group.rank == 0:
            group.broadcast_bytes(json.dumps(state.cursor()).encode(), 0)
            for tensor in list(state.named().values())[:4]:
                group.broadcast(tensor, 0)
            group.abort()
            return None
        before = state.hashes(), state.cursor()
        with pytest.raises(GroupLost):
            share_state(group, state, 0)
        assert (state.hashes(), state.cursor()) == before
        return True

    assert in_threads(2, work) == [None, True]
