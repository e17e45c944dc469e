"""Codecs: what they keep, beside the rule in float64; a block gives the same bytes wherever it is."""

import pytest
import torch
from world import in_threads

from lockstep.comm.bucket import ReducedTensor
from lockstep.comm.compress.codec import make_codec
from lockstep.comm.compress.feedback import Feedback
from lockstep.comm.compress.low_rank_bucket import make_orthogonal
from lockstep.comm.reducer import Reducer
from lockstep.comm.tree import worker_lanes
from lockstep.errors import SpecError
from lockstep.spec.rule.compression import BLOCK, explain_compression, own_blocks, read_compression

BY_BLOCK = ("bf16", "fp8", "int8", "top:0.01", "top:0.25")
EVERY = (*BY_BLOCK, "rank:1", "rank:3")


def blocks(count, seed=0):
    return torch.randn(count, BLOCK, generator=torch.Generator().manual_seed(seed)) * 3e-4


@pytest.mark.parametrize(("kind", "most"), [("bf16", 4e-3), ("fp8", 7e-2), ("int8", 4e-3)])
def test_types_lose_as_much_as_their_last_place(kind, most):
    how, given = read_compression(kind), blocks(5)
    given[2], given[3, 5] = 0.0, 1.0  # nothing at all; one value far above the others
    codec = make_codec(how)
    rows = codec.encode(given)
    assert rows.dtype == torch.uint8 and rows.shape == (5, how.row_bytes)
    lost = (codec.decode(rows).double() - given.double()).abs().amax(1)
    assert bool((lost <= most * given.abs().amax(1)).all())


def test_top_keeps_the_largest_and_of_equal_ones_the_first():
    codec, given = make_codec(read_compression("top:0.01")), blocks(4)
    given[1] = 1.0
    given[2] = torch.arange(BLOCK) % 2 - 0.5
    given[3] = 0.0
    found, count = codec.decode(codec.encode(given)), 41
    expected = torch.zeros_like(given)
    for row, values in enumerate(given):
        chosen = sorted(range(BLOCK), key=lambda i: (-abs(float(values[i])), i))[:count]
        expected[row, chosen] = values[chosen]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", BY_BLOCK)
def test_a_block_is_the_same_bytes_beside_any_others(kind):
    codec, given = make_codec(read_compression(kind)), blocks(7)
    whole = codec.encode(given)
    for first, stop in ((0, 1), (3, 7), (6, 7)):
        part = codec.encode(given[first:stop].clone())
        assert torch.equal(part, whole[first:stop])
        assert torch.equal(codec.decode(part), codec.decode(whole)[first:stop])


@pytest.mark.parametrize("kind", BY_BLOCK)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(kind, bad):
    codec, given = make_codec(read_compression(kind)), blocks(1)
    given[0, 17] = bad
    assert not codec.decode(codec.encode(given)).isfinite().all()


def test_directions_are_orthogonal():
    given = torch.randn(300, 5, generator=torch.Generator().manual_seed(1))
    given[:, 3] = given[:, 1]  # nothing new
    found = make_orthogonal(given).double()
    expected = torch.eye(5, dtype=torch.float64)
    expected[3, 3] = 0
    assert float((found.t() @ found - expected).abs().max()) < 1e-6
    assert not found[:, 3].any()


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
def test_every_block_has_one_owner(workers):
    for index in range(3):
        for count in (1, 2, 7, 40):
            owned = [own_blocks(count, index, workers, rank) for rank in range(workers)]
            assert sorted(block for own in owned for block in own) == list(range(count))
            assert max(map(len, owned)) - min(map(len, owned)) <= 1


PARAMS = {"conv": (40, 30, 3, 3), "bias": (40,), "small": (20, 20), "linear": (50, 700), "tall": (4096, 3)}


def gradients(step, lane):
    maker = torch.Generator().manual_seed(100 * step + lane)
    return [torch.randn(shape, generator=maker) for shape in PARAMS.values()]


def reduce(group, kind, bucket_mb, steps=3, lanes=8):
    """The means of some steps, and what is remembered at the end."""
    params = {name: torch.zeros(shape) for name, shape in PARAMS.items()}
    params["conv"] = params["conv"].contiguous(memory_format=torch.channels_last)
    feedback = Feedback(read_compression(kind), params, lanes, group)
    entries = [ReducedTensor(p, None, name) for name, p in params.items()]
    reducer = Reducer(group, lanes, entries, bucket_mb, feedback=feedback)
    means = []
    for step in range(steps):
        for _ in range(2):  # the first try is lost half way
            reducer.begin()
            for lane in worker_lanes(lanes, group.size, group.rank):
                reducer.add(gradients(step, lane))
            means.append([mean.clone() for mean in reducer.finish()])
        assert all(map(torch.equal, means.pop(), means[-1]))
        reducer.commit()
    sent = reducer.sent_bytes
    reducer.close()
    kept = {(p.name, p.start): p.tensor.clone() for p in feedback.pieces()}
    return means, kept, sent


def joined(found):
    """What all workers remember together: by name, in the order of elements."""
    pieces = {place: tensor for _, kept, _ in found for place, tensor in kept.items()}
    names = sorted({name for name, _ in pieces})
    return {n: torch.cat([pieces[p].view(-1) for p in sorted(pieces) if p[0] == n]) for n in names}


@pytest.mark.gloo
@pytest.mark.parametrize("kind", EVERY)
def test_any_number_of_workers_gives_the_same_means_and_memory(kind):
    alone = in_threads(1, lambda group: reduce(group, kind, 25.0))
    exact = [
        [sum(each) / 8 for each in zip(*(gradients(step, lane) for lane in range(8)), strict=True)]
        for step in range(3)
    ]
    for workers, bucket_mb in ((2, 0.05), (3, 25.0), (5, 0.001), (8, 0.1)):
        found = in_threads(workers, lambda group, mb=bucket_mb: reduce(group, kind, mb))
        for means, _, _ in found:
            for step, expected in zip(means, alone[0][0], strict=True):
                assert all(map(torch.equal, step, expected))
        there, here = joined(found), joined(alone)
        assert there.keys() == here.keys()
        assert all(torch.equal(there[name], here[name]) for name in here)
    means = alone[0][0]
    for place, name in enumerate(PARAMS):
        told = sum(step[place].double() for step in means)
        given = sum(step[place].double() for step in exact)
        kept = [
            v for n, v in joined(alone).items() if n.startswith("feedback.lane") and n.endswith(f".{name}")
        ]
        lost = torch.stack(kept).double().mean(0) if kept else torch.zeros(1, dtype=torch.float64)
        if (mean := joined(alone).get(f"feedback.mean.{name}")) is not None:
            lost = lost + mean.double()
        rest = (told.reshape(-1) + lost - given.reshape(-1)).abs().max()  # nothing is lost for good
        assert float(rest) < 2e-5, name


@pytest.mark.gloo
def test_fewer_bytes_are_sent():
    sent = {
        kind: max(sent for _, _, sent in in_threads(4, lambda group, kind=kind: reduce(group, kind, 25.0)))
        for kind in ("top:0.01", "int8", "rank:1")
    }
    params = {name: torch.zeros(shape) for name, shape in PARAMS.items()}
    plain = 2 * 3 * 4 * sum(p.numel() for p in params.values()) // 4
    assert sent["top:0.01"] < 0.1 * plain and sent["int8"] < 0.6 * plain and sent["rank:1"] < 0.6 * plain


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gzip", "train.compress=gzip must be one of none, bf16, fp8, int8, top:SHARE, rank:NUMBER"),
        ("top:0", "train.compress=top:0 takes the share of elements that travels, above 0"),
        ("top:nan", "train.compress=top:nan takes the share"),
        ("top", "train.compress=top takes the share"),
        ("rank:2.5", "train.compress=rank:2.5 takes the rank of what travels, a whole number from 1 to 64"),
        ("rank:inf", "train.compress=rank:inf takes the rank"),
        ("int8:4", "train.compress=int8:4 must be one of"),
        ("", "train.compress= must be one of"),
    ],
)
def test_what_cannot_be_is_refused(text, says):
    with pytest.raises(SpecError) as refusal:
        read_compression(text)
    assert says in str(refusal.value)


def test_what_is_compressed_and_how_much_is_remembered():
    shapes = [(64, 64), (64,), (63, 65), (8, 64, 3, 3)]
    assert [read_compression("int8").takes(shape) for shape in shapes] == [True, False, False, True]
    assert not read_compression("rank:20").takes((64, 64))
    (line,) = explain_compression("int8", shapes, 8)
    assert "2 of 4 tensors of parameters" in line and f"{9 * 4 * (4096 + 4608) / 1e6:.1f} MB" in line
    assert "changes nothing" in explain_compression("int8", [(3, 3)], 8)[0]
