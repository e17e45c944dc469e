"""A model cut anywhere, in one process: the bits of the uncut one; and which cuts are refused."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from parallel.staged import cut, same, trace, uncut
from torch import nn

from lockstep.errors import ModelError
from lockstep.models import build
from lockstep.parallel.cut import Trial, choose_cuts, named_cuts

pytestmark = pytest.mark.usefixtures("deterministic")


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


class NormAndCount(nn.BatchNorm2d):
    """Counts in its own forward, as fused norms of timm do."""

    def forward(self, x):
        self.num_batches_tracked.add_(1)
        return F.relu(F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, True))


class LongSkip(nn.Module):
    """Its input and an early result are used at the end; a weight is used twice, and one part is frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.middle = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.norm, self.frozen = NormAndCount(3), nn.Conv2d(3, 3, 1)
        self.tied = nn.Conv2d(3, 3, 3, padding=1)
        self.tied.weight = self.first.weight
        self.gain = nn.Parameter(torch.ones(3, 1, 1))
        self.frozen.requires_grad_(False)

    def forward(self, x):
        early = F.relu(self.first(x)) * self.gain
        late = self.norm(self.middle(early))
        late = F.dropout(late, 0.3, self.training)
        late = self.frozen(late) + early
        late = self.tied(late.relu_()) * self.gain + early
        return {"a": late.mean((2, 3)), "b": (late + x).flatten(x.dim() - 3)}


class Chooses(nn.Module):
    """What it computes depends on values and on a random number, so it is one call."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 and torch.rand(()) < 2 else x


def chooser():
    return nn.Sequential(nn.Linear(4, 4), Chooses(), nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))


def ours(name):
    return build(name, in_channels=3, num_classes=4, image_size=(16, 16))


MODELS = {
    "skip": (LongSkip, (3, 8, 8)),
    "resnet18": (partial(ours, "resnet18"), (3, 16, 16)),
    "googlenet": (partial(ours, "googlenet"), (3, 16, 16)),
    "chooses": (chooser, (4,)),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_cut_gives_the_bits_of_the_uncut_model(name):
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make()
    images = torch.randn(4, *shape, generator=torch.Generator().manual_seed(2))
    if name == "resnet18":  # kernels choose by strides, which stages must keep
        model, images = (
            model.to(memory_format=torch.channels_last),
            images.contiguous(memory_format=torch.channels_last),
        )
    model.train()
    graph, trial = trace(model, images)
    whole = uncut(model, images)
    step = 1 if len(trial.allowed) < 20 else 9
    assert len(trial.allowed) > 2
    for place in trial.allowed[::step]:
        assert same(cut(model, images, graph, trial, [place]), whole), graph.label(place)
    assert same(cut(model, images, graph, trial, trial.allowed[:: max(step, 2)]), whole)


def test_no_cut_is_before_a_change_in_place_or_between_uses_of_a_buffer():
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(
        nn.Linear(4, 4), nn.ReLU(inplace=True), norm, nn.Linear(4, 4), norm, nn.Linear(4, 4)
    )
    graph, trial = trace(model, torch.randn(3, 4))
    labels = [graph.label(place) for place in range(len(graph.calls))]
    assert [labels[place] for place in trial.allowed] == ["2", "5"]
    with pytest.raises(ModelError, match="can be cut at 2 places only: use at most 3 stages"):
        choose_cuts(trial.costs, trial.allowed, 4)
    with pytest.raises(ModelError, match="cannot be cut before '1'"):
        named_cuts(labels, trial.allowed, ["1"])
    with pytest.raises(ModelError, match="no layer 'nine'"):
        named_cuts(labels, trial.allowed, ["nine"])
    with pytest.raises(ModelError, match="in the order"):
        named_cuts(labels, trial.allowed, ["5", "2"])
    assert named_cuts(labels, trial.allowed, ["2", "5"]) == [2, 5]


@pytest.mark.parametrize(
    ("costs", "stages", "wanted"),
    [([1, 1, 1, 1], 2, [2]), ([5, 1, 1, 1], 2, [1]), ([1, 2, 3, 4, 5], 3, [3, 4]), ([1, 1, 9], 3, [1, 2])],
)
def test_stages_are_balanced(costs, stages, wanted):
    trial = Trial(list(range(1, len(costs))), [float(cost) for cost in costs], {}, {}, False)
    assert choose_cuts(trial.costs, trial.allowed, stages) == wanted


class Loops(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


def test_a_model_that_cannot_be_traced_is_refused_with_the_reason():
    with pytest.raises(ModelError, match=r"Loops cannot be cut into stages.*nn\.Sequential"):
        trace(Loops(), torch.randn(2, 4))
