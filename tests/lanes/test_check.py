"""`lanes.check` finds what would make the bits depend on the number of workers, and names it."""

import random
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep import lanes
from lockstep.errors import ModelError

X, Y = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 4


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (1 + 0.01 * self.calls)


class OwnGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.draw = torch.Generator().manual_seed(1)

    def forward(self, x):
        return x + torch.randn(x.shape, generator=self.draw)


class Bank(nn.Module):
    def __init__(self):
        super().__init__()
        self.means = torch.zeros(4)

    def forward(self, x):
        self.means = 0.9 * self.means + 0.1 * x.detach().mean((0, 2, 3))
        return x + self.means[None, :, None, None]


class Put(nn.Module):
    def forward(self, x):
        return x.put(torch.tensor([0]), x.detach()[0, 0, 0, :1])


class Harmless(nn.Module):
    """A cache that is filled once, Python's own `random`, and a buffer that changes."""

    def __init__(self):
        super().__init__()
        self.cache = None
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        if self.cache is None:
            self.cache = torch.ones(())
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return x * self.cache * random.random() + self.mean


def net(*middle):
    torch.manual_seed(0)
    tail = nn.Dropout(0.3), nn.Flatten(), nn.Linear(144, 4)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), *middle, *tail)


def loss(model, lane):
    return F.cross_entropy(model(lane[0]), lane[1])


def test_what_lanes_keep_equal_passes_and_nothing_is_changed():
    model = net(Harmless())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state(), random.getstate(), torch.get_num_threads(), model.training
    assert lanes.check(model, (X, Y), loss) == ""
    assert lanes.check(model, X) == ""
    assert lanes.check(model, {"x": X, "y": Y}, lambda m, lane: loss(m, (lane["x"], lane["y"]))) == ""
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert torch.equal(state[0], torch.get_rng_state())
    assert state[1:] == (random.getstate(), torch.get_num_threads(), model.training)


@pytest.mark.parametrize(
    ("middle", "operation", "cause"),
    [
        (Counting, r"aten\.mul\.Tensor in '2' \(Counting\)", "changes its attribute 'calls' in every lane"),
        (OwnGenerator, r"aten\.randn\.generator in '2' \(OwnGenerator\)", "NumPy's global generator"),
        (Bank, r"aten\.mul\.Tensor in '2' \(Bank\)", "changes its attribute 'means' in every lane"),
    ],
)
def test_the_first_operation_that_differs_is_named(middle, operation, cause):
    found = lanes.check(net(middle()), (X, Y), loss)
    assert re.match(rf"step 0, lane 2: {operation} differs with 2 workers: ", found), found
    assert cause in found


def test_what_is_random_each_time_is_named():
    outside = random.Random()

    def noisy(model, lane):
        return loss(model, lane) * outside.random()

    found = lanes.check(net(), (X, Y), noisy)
    assert found.startswith(
        "step 0, lane 0: aten.mul.Tensor in the loss or the backward pass differs when it"
    )


def test_bad_input_is_named():
    with pytest.raises(ModelError, match=r"put.* does not have a deterministic implementation.*take another"):
        lanes.check(net(Put()), (X, Y), loss)
    with pytest.raises(ModelError, match=r"have \[15, 16\] samples: all must have as many"):
        lanes.check(net(), (X, Y[:15]), loss)
    with pytest.raises(ModelError, match="a multiple of lanes=4"):
        lanes.check(net(), (X[:6], Y[:6]), loss)
    with pytest.raises(ModelError, match="must give one number"):
        lanes.check(net(), (X, Y), lambda model, lane: model(lane[0]))


class LateCounter(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 2), 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x) * (0.5 if self.calls > 1000 else 1.0)


class DataCounter(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += int(x.sum() * 1000)
        return self.layer(x)


def test_a_counter_that_matters_only_later_is_told():
    assert "'calls'" in lanes.check(LateCounter(), torch.randn(8, 4))


@pytest.mark.parametrize(
    ("model", "batch", "text"),
    [
        (DataCounter(), torch.randn(8, 4), "integer buffer"),
        (nn.Sequential(nn.Conv2d(1, 2, 1), nn.SyncBatchNorm(2)), torch.randn(8, 1, 2, 2), "SyncBatchNorm"),
        (nn.Linear(4, 2), torch.full((8, 4), float("nan")), "is nan"),
        (nn.Flatten(), torch.randn(8, 4), "parameters that are trained"),
        ("a text", torch.randn(8, 4), "give a module"),
    ],
)
def test_what_a_session_refuses_is_refused(model, batch, text):
    with pytest.raises(ModelError, match=text):
        lanes.check(model, batch)
