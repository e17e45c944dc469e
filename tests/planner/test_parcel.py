"""Bytes by the planner are those that the reducer sends, of every worker, to the byte."""

import pytest
import torch
from torch import nn
from world import in_threads

from lockstep.comm.bucket import ReducedTensor
from lockstep.comm.compress.codec import make_codec
from lockstep.comm.compress.feedback import Feedback
from lockstep.comm.reducer import Reducer
from lockstep.comm.tree import worker_lanes
from lockstep.measure.layer_count import list_buffers, list_weights
from lockstep.models import build_model
from lockstep.planner.compress.parcel import Sender
from lockstep.spec import Model, Run
from lockstep.spec.profile import WeightShape
from lockstep.spec.rule.compression import BLOCK, KINDS, read_compression

SCHEMES = ("none", "bf16", "fp8", "int8", "top:0.01", "top:0.2", "rank:1", "rank:4")
MODELS = {
    "lenet5": lambda: build_model(Run(model=Model(name="lenet5")), (1, 28, 28), 10),
    "emotion48": lambda: build_model(Run(model=Model(name="emotion48")), (1, 48, 48), 7),
    "with norms": lambda: nn.Sequential(
        nn.Conv2d(3, 33, 7), nn.BatchNorm2d(33), nn.Conv2d(33, 50, 3), nn.BatchNorm2d(50)
    ),
}
MIXED = ((2, 2), (3, 8), (4, 4), (5, 8))  # workers, lanes


def sent_by(group, lanes, entries, params, scheme):
    compression = read_compression(scheme)
    feedback = Feedback(compression, params, lanes, group) if compression else None
    reducer = Reducer(group, lanes, entries, overlap=False, feedback=feedback)
    reducer.begin()
    if scheme != "none":  # plain buckets know it before
        for _ in worker_lanes(lanes, group.size, group.rank):
            reducer.add([torch.zeros_like(entry.like) for entry in entries])
        reducer.finish()
    return reducer.sent_bytes


@pytest.mark.gloo
@pytest.mark.parametrize("name", MODELS)
def test_bytes_of_models(name):
    model = MODELS[name]()
    params = {key: p.detach() for key, p in model.named_parameters()}
    entries = [ReducedTensor(p, None, key) for key, p in reversed(params.items())]
    entries += [ReducedTensor(b) for b in model.buffers() if b.is_floating_point()]
    entries += [ReducedTensor(torch.zeros(()))] * 4
    weights, others = list_weights(model), (*list_buffers(model), 1, 1, 1, 1)
    for workers, lanes in MIXED:

        def every(group, lanes=lanes):
            return [sent_by(group, lanes, entries, params, scheme) for scheme in SCHEMES]

        found = in_threads(workers, every)
        for place, scheme in enumerate(SCHEMES):
            parcels = Sender(lanes, workers, read_compression(scheme)).parcels(weights, others)
            told = [sum(parcel.sent[rank] for parcel in parcels) for rank in range(workers)]
            assert told == [row[place] for row in found], (scheme, workers, lanes)


@pytest.mark.gloo
@pytest.mark.parametrize(("scheme", "wire"), [("none", None), ("none", torch.bfloat16), ("rank:2", None)])
def test_bytes_of_several_buckets(scheme, wire):
    """25 MB are a bucket; what is larger has its own."""
    sizes = {"a": (900, 2000), "b": (7_000_001,), "c": (2000, 2000), "d": (1999, 1500), "e": (30,)}
    params = {name: torch.empty(1).expand(shape) for name, shape in sizes.items()}  # no memory of their own
    entries = [ReducedTensor(p, wire, name) for name, p in reversed(params.items())]
    found = in_threads(3, lambda group: _laid_out(group, entries, params, scheme))
    weights = [WeightShape(name, shape) for name, shape in sizes.items()]
    parcels = Sender(4, 3, read_compression(scheme), 2 if wire else 4).parcels(weights)
    assert [sum(parcel.sent[rank] for parcel in parcels) for rank in range(3)] == [row[0] for row in found]
    assert [parcel.num_bytes for parcel in parcels] == found[0][1]


def _laid_out(group, entries, params, scheme):
    compression = read_compression(scheme)
    feedback = Feedback(compression, params, 4, group) if compression else None
    reducer = Reducer(group, 4, entries, overlap=False, feedback=feedback)
    reducer.begin()
    return reducer.sent_bytes, [
        sum(entries[i].num_bytes // (2 if entries[i].wire else 1) for i in bucket.indices)
        for bucket in reducer._buckets
    ]


@pytest.mark.parametrize(
    "scheme", [kind for kind in SCHEMES if kind.partition(":")[0] not in ("none", "rank")]
)
def test_a_row_is_as_long_as_the_codec_makes_it(scheme):
    how = read_compression(scheme)
    assert make_codec(how).encode(torch.zeros(1, BLOCK)).shape == (1, how.row_bytes)
    assert {kind.partition(":")[0] for kind in KINDS} == {kind.partition(":")[0] for kind in SCHEMES}


def test_rounds_are_the_most_that_a_worker_sends_or_gets():
    """Two workers, three blocks: one sums two of them, so the other sends it two rows."""
    (parcel,) = Sender(2, 2, read_compression("bf16")).parcels([WeightShape("w", (3, 4096))])
    assert parcel.rounds == (2 * 8192, 2 * 8192) and sorted(parcel.sent) == [3 * 8192, 3 * 8192]
    assert (parcel.values, parcel.own_values, parcel.parts) == (3 * 4096, 2 * 4096, 2)
    (parcel,) = Sender(8, 2, read_compression("bf16")).parcels([WeightShape("w", (3, 4096))])
    assert parcel.rounds[0] == 2 * 16384 and parcel.parts == 2  # four lanes: their sum is smaller
