"""A fully connected layer over workers along data, beside one worker: the bits, and what is sent."""

import pytest
import torch
from torch import nn
from world import in_threads

from lockstep.comm.group import Group
from lockstep.comm.tree import LaneTree, worker_lanes
from lockstep.errors import ModelError
from lockstep.parallel.mix.lane_round import LaneForm, LaneRound
from lockstep.parallel.mix.layer_pattern import find_layers
from lockstep.parallel.mix.mix import Mix
from lockstep.parallel.mix.mixed_linear import MixedLinear
from lockstep.parallel.mix.row_block import RowSharedModel
from lockstep.parallel.mix.row_cut import RowCut
from lockstep.parallel.split.axes import Axes
from lockstep.parallel.split.layers.split_linear import LinearCut
from lockstep.parallel.split.split_model import split_model
from lockstep.parallel.split.spread import WHOLE
from lockstep.spec import Train
from lockstep.spec.plan import Plan
from lockstep.train.clip import chunk_sums, gradient_norm, norm_of_chunks

LANES, SLICES, SAMPLES = 8, 8, 4
INS, OUTS = 96, 200


def lane(number, width):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(SAMPLES, width, generator=generator)


def make_layer():
    """Without torch's generator, which threads share."""
    model = nn.Sequential(nn.Linear(INS, OUTS))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.normal_(generator=torch.Generator().manual_seed(number))
    return model


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as every worker has
    yield
    torch.set_num_threads(before)


def by_one_worker(dtype):
    """Outputs and gradients of every lane, and the mean of the weight's gradient."""
    layer, cut = make_layer()[0], LinearCut(Axes(slices=SLICES), WHOLE, WHOLE, INS, OUTS)
    tree, found = LaneTree(), []
    for number in range(LANES):
        x = lane(number, INS).to(dtype).requires_grad_()
        y = cut(x, layer.weight.to(dtype), layer.bias.to(dtype))
        ends = x, layer.weight, layer.bias
        dx, dw, db = torch.autograd.grad(y, ends, lane(number + 99, OUTS).to(dtype))
        tree.add([dw])
        found.append((y.detach(), dx, db))
    return found, tree.mean()[0]


@pytest.mark.gloo
@pytest.mark.parametrize("half", [None, torch.bfloat16])
@pytest.mark.parametrize("workers", [2, 3, 5, 8])
def test_a_layer_over_workers_has_the_bits_of_one_worker(workers, half):
    dtype = half or torch.float32
    lanes, mean = by_one_worker(dtype)

    def work(group):
        torch.set_num_threads(1)  # each thread has a number of its own
        model, rounds = make_layer(), LaneRound(group, LANES)
        cut = RowCut(INS, OUTS, SLICES, workers, group.rank)
        shared = RowSharedModel(model, {"0.weight": cut}, group)
        layer = MixedLinear("0", model[0], cut, rounds, None)
        layer.form, layer.rows = (
            LaneForm(SAMPLES, dtype, torch.device("cpu")),
            lambda: shared.rows("0.weight"),
        )
        own = worker_lanes(LANES, workers, group.rank)
        for number, which in enumerate(own):
            rounds.begin(number)
            x = lane(which, INS).to(dtype).requires_grad_()
            y = layer(x)
            dx, db, dw = torch.autograd.grad(
                y, (x, model[0].bias, model[0].weight), lane(which + 99, OUTS).to(dtype), allow_unused=True
            )
            expected = lanes[which]
            assert dw is None
            assert all(torch.equal(a, b) for a, b in zip((y, dx, db), expected, strict=True))
        for number in range(len(own), rounds.count):
            rounds.pass_over(number)
        assert layer.traffic.num_bytes == layer.sent_bytes
        rows = slice(cut.own.start, cut.own.stop)
        own_mean = layer.mean()
        assert torch.equal(own_mean.view(-1, INS), mean[rows])
        whole = shared.by_chunks({("0.weight", cut.own.start * INS): own_mean})
        return {place: chunk_sums(part) for place, part in whole.items()}

    chunks = {place: sums for found in in_threads(workers, work) for place, sums in found.items()}
    assert torch.equal(norm_of_chunks(chunks), gradient_norm({"0.weight": mean}))


def test_a_layer_whose_kernels_give_other_bits_in_parts_is_refused(monkeypatch):
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8))
    grid = split_model(model, Axes(slices=2), torch.empty(2, 1, 4, 4), half=None)
    plan, train = Plan(data=2, layers=("1",)), Train(lanes=2, batch=4)
    assert [layer.name for layer in Mix(grid, plan, train, Group()).layers.values()] == ["1"]
    monkeypatch.setattr("lockstep.parallel.mix.mix._differs", lambda *given: True)
    with pytest.raises(ModelError, match="other bits for some outputs of '1' than for all"):
        Mix(grid, plan, train, Group())


def test_every_output_is_one_worker_s():
    for workers in range(1, SLICES + 1):
        cuts = [RowCut(INS, OUTS, SLICES, workers, rank) for rank in range(workers)]
        assert [row for cut in cuts for row in cut.own] == list(range(OUTS))
        assert all(cut.own_slices[-1].stop == len(cut.own) for cut in cuts)


def test_patterns_name_fully_connected_layers():
    model = nn.ModuleDict(
        {
            "front": nn.Conv2d(1, 4, 3),
            "hidden1": nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
            "hidden2": nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
            "head": nn.Linear(4, 2),
        }
    )
    assert find_layers(model, ["hidden1"]) == ["hidden1.0"]
    assert find_layers(model, ["hidden*"]) == ["hidden1.0", "hidden2.0"]
    assert find_layers(model, ["head:data", "*"]) == ["hidden1.0", "hidden2.0"]
    with pytest.raises(ModelError, match="leaves all layers whole"):
        find_layers(model, ["*:data"])
    for pattern, text in (("front", "fits no fully connected layer"), ("tail", "fits no layer")):
        with pytest.raises(ModelError, match=text):
            find_layers(model, ["head", pattern])
