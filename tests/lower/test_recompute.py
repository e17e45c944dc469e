"""Blocks that are computed again: the same bits, less memory, and what is refused."""

import signal
import weakref

import forked
import pytest
import torch
from small import small_run, summary, train, train_command
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.data.loader import Lanes
from lockstep.errors import Interrupted, ModelError
from lockstep.lower.lane_by_lane import LaneByLane
from lockstep.lower.recompute import RecomputedBlocks
from lockstep.runs.event import StepDone

ON = "train.recompute=true"
KEYS = ("train.clip=1.0", "train.ema=0.9", "data.num_train=50", "data.num_test=10", "train.batch=16")


class Noisy(nn.Module):
    """A block with a batch norm, dropout, numbers of torch's own stream, and a count that it reads."""

    def __init__(self, width):
        super().__init__()
        self.conv, self.norm, self.drop = (
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.Dropout(0.2),
        )
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        y = self.drop(self.norm(self.conv(x)).relu())
        return x + y * (1 + 0.1 * self.calls) + 0.01 * torch.rand_like(x)


def blocks():
    torch.manual_seed(0)
    body = nn.Sequential(*(Noisy(4) for _ in range(2)))
    return nn.Sequential(nn.Conv2d(1, 4, 3), body, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 10))


def chain():
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3),
        nn.ReLU(inplace=True),
    ]
    return nn.Sequential(*layers, nn.Dropout(0.3), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(36, 10))


def hashes(found):
    return {
        key: value for key, value in found.items() if key.endswith("sha256") or key in ("loss", "identity")
    }


@pytest.mark.parametrize(("model", "overrides"), [(blocks, ()), (chain, ("train.precision=bf16",))])
def test_the_bits_are_those_without(model, overrides, tmp_path):
    """Also of a run that is stopped without it and goes on with it."""
    keys = (*KEYS, *overrides)
    plain, _ = train(small_run(*keys), tmp_path / "plain", model=model())
    again, _ = train(small_run(*keys, ON), tmp_path / "again", model=model())
    assert hashes(again.summary) == hashes(plain.summary)

    def stop(event):
        if isinstance(event, StepDone) and event.step == 2:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted):
        train(small_run(*keys), tmp_path / "cut", model=model(), on_event=stop)
    resumed, _ = train(small_run(*keys, ON), tmp_path / "cut", model=model(), launch={"resume": "auto"})
    assert hashes(resumed.summary) == hashes(plain.summary)


@pytest.mark.gloo
def test_three_workers_that_share_gradients(by_one_worker, tmp_path):
    flags = ("--plan", "data=3,shard=gradients", "--bucket-mb", "0.05")
    done = forked.call(train_command(tmp_path, *flags, overrides=(*KEYS, ON)), launches=True)
    assert done.returncode == 0, done.stderr
    assert hashes(summary(tmp_path / "run")) == hashes(by_one_worker(*KEYS))


class Live(TorchDispatchMode):
    """Counts the bytes of all tensors that are made and still there."""

    def __init__(self):
        super().__init__()
        self.bytes, self.peak, self._known = 0, 0, set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        found = op(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return found

    def _count(self, storage):
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, key, size):
        self._known.discard(key)
        self.bytes -= size


def test_it_takes_less_memory():
    """Of three outputs of each of the 12 blocks that are kept without it, one, and those of one block."""
    layers = [
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Sigmoid(), nn.Tanh()) for _ in range(12)
    ]
    way = LaneByLane(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), cross_entropy, 0, None)
    peaks, lanes = [], Lanes(torch.zeros(8, 4, 32, 32), torch.arange(8) % 4, 1)
    for _ in range(2):
        with Live() as live:
            next(way.run(lanes, 0))
        peaks.append(live.peak)
        way.recompute()
    assert peaks[1] < 0.5 * peaks[0], peaks


def test_what_cannot_be_computed_again_says_why(tmp_path):
    class Inplace(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.ReLU(inplace=True)

        def forward(self, x):
            return self.act(x) + 1

    changed = nn.Sequential(nn.Flatten(), nn.Linear(256, 10), nn.Sequential(Inplace()))
    with pytest.raises(ModelError, match=r"train.recompute=true: '2.0' changes its input in place"):
        train(small_run(*KEYS, ON), tmp_path, model=changed)

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(256, 10)

        def forward(self, x):
            return self.last(x.flatten(1))

    with pytest.raises(ModelError, match=r"train.recompute=true: the model has no nn.Sequential"):
        train(small_run(*KEYS, ON), tmp_path, model=Plain())


def test_release_gives_blocks_their_own_forward_back():
    model = blocks()
    recomputed = RecomputedBlocks(model)
    assert sum("forward" in vars(module) for module in model.modules()) == 2
    recomputed.release()
    assert not any("forward" in vars(module) for module in model.modules())
